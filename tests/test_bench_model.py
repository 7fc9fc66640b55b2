"""`kbit bench model`: shipped sizes, building by blocks, the loop, the command; small models on a CPU."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from typer.testing import CliRunner

import kbit
from kbit.bench import model as bench
from kbit.bench import model_build, model_decode
from kbit.cli import app
from kbit.format.policy import QuantizationPolicy
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear, QuantizedModule
from tiny_models import ARCHITECTURES, build, write_config

CPU = torch.device("cpu")
MIXTURES = ("qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm4_moe_lite")
# Of the models themselves: what their cards say, in billions.
PARAMETERS = {
    "qwen3-coder-next": 79.7,
    "qwen3.5-35b-a3b": 34.7,  # without its vision tower
    "qwen3-30b-a3b": 30.5,
    "glm-4.7-flash": 29.9,
    "llama-3-8b": 8.03,
    "llama-3-70b": 70.6,
}


@pytest.fixture
def config_file(tmp_path, request):
    """The config.json of a tiny model."""
    path = tmp_path / f"{request.param}.json"
    config = ARCHITECTURES[request.param]()
    return str(write_config(config, path))


# -- configs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_shipped_sizes_are_those_of_the_models(name):
    assert model_build.config_names() == sorted(PARAMETERS)
    # All blocks of a model but few kinds of them: from 4 and 8 layers follow all.
    four, eight = (model_build.sixteen_bit_bytes(model_build.load_config(name, n)) for n in (4, 8))
    layers = model_build.load_config(name).num_hidden_layers
    parameters = (four + (eight - four) * (layers - 4) / 4) / 2
    assert parameters / 1e9 == pytest.approx(PARAMETERS[name], rel=0.01)


def test_a_config_can_keep_its_first_layers(tmp_path):
    config = model_build.load_config("qwen3-coder-next", 5)
    assert config.layer_types == ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    assert model_build.load_config("glm-4.7-flash", 2).mlp_layer_types == ["dense", "sparse"]
    with pytest.raises(ValueError, match="has 32 layers, of which 1 to 32 can be kept; got 33"):
        model_build.load_config("llama-3-8b", 33)
    nested = tmp_path / "nested.json"
    nested.write_text('{"model_type": "gemma3", "text_config": {"num_hidden_layers": 4}}')
    with pytest.raises(ValueError, match="states no num_hidden_layers"):
        model_build.load_config(str(nested), 2)


@pytest.mark.parametrize("config_file", ["qwen3_next"], indirect=True)
def test_lists_with_an_entry_for_each_layer_are_cut_too(config_file):
    assert model_build.load_config(config_file, 1).layer_types == ["linear_attention"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON .*nested too deeply"),
        ("[]", "a config is a JSON object, got list"),
        ('{"hidden_size": 3}', "model_type must name a class of transformers, got None"),
    ],
)
def test_what_is_no_config_is_refused(text, message, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        model_build.load_config(str(path))


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match=r"no model 'gpt-5'; known: glm-4.7-flash, llama-3-70b"):
        model_build.load_config("gpt-5")


# -- building ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config_file", ARCHITECTURES, indirect=True)
def test_models_are_built_quantized_and_finite(config_file):
    config = model_build.load_config(config_file)
    seen = []
    policy = QuantizationPolicy(bits=3, embedding_bits=5, search=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        built = model_build.build(
            config, CPU, policy=policy, progress=lambda done, of, name: seen.append(name)
        )
    assert seen == ["model.embed_tokens", "model.layers.0", "model.layers.1", *seen[3:]]
    tensors = [*built.model.parameters(), *built.model.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    widths = {name: m.bits for name, m in built.model.named_modules() if isinstance(m, QuantizedModule)}
    assert widths["lm_head"] == widths["model.embed_tokens"] == 5
    assert isinstance(built.model.model.embed_tokens, KbitEmbedding)
    assert set(widths.values()) == {3, 5}
    left = [name for name, module in built.model.named_modules() if type(module) is torch.nn.Linear]
    assert all(name.endswith("shared_expert_gate") for name in left)
    if config.model_type in MIXTURES:
        assert any(isinstance(module, KbitExperts) for module in built.model.modules())
    with torch.no_grad():
        assert built.model(torch.tensor([[3, 1, 4]])).logits.isfinite().all()
    assert built.weight_bytes == sum({id(t): t.nbytes for t in tensors}.values())
    assert built.peak_bytes is None


def test_a_policy_sees_full_names():
    config = model_build.load_config("llama-3-8b", 1)
    config.update({"hidden_size": 64, "intermediate_size": 96, "vocab_size": 80, "num_attention_heads": 4})
    config.update({"num_key_value_heads": 2, "head_dim": 16})
    policy = QuantizationPolicy(overrides={r"model\.layers\.0\.mlp\.down_proj": 2, "q_proj": 0})
    layer = model_build.build(config, CPU, policy=policy).model.model.layers[0]
    assert (layer.mlp.down_proj.bits, layer.mlp.up_proj.bits) == (2, 4)
    assert layer.mlp.down_proj.layer_name == "model.layers.0.mlp.down_proj"
    assert not isinstance(layer.self_attn.q_proj, KbitLinear)


def test_the_weights_quantized_are_those_of_the_baseline():
    config = ARCHITECTURES["qwen3"]()
    config.tie_word_embeddings = False
    plain = model_build.build(config, CPU, torch.float32).model
    quantized = model_build.build(config, CPU, torch.float32, QuantizationPolicy(bits=5)).model
    weight = plain.model.layers[1].mlp.up_proj.weight
    assert torch.equal(
        quantized.model.layers[1].mlp.up_proj.dequantize(), kbit.dequantize(kbit.quantize(weight, 5))
    )


# -- the loop ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", [*MIXTURES, "llama"])
def test_steps_decode_what_the_whole_sequence_would(architecture):
    model = build(architecture, torch.float32, spread=False)
    loop = model_decode.DecodeLoop(model, batch=2, prompt=5, steps=4)
    loop.read_prompt()
    loop.warm_up()
    loop.read_prompt()
    loop.rewind()
    chosen = []
    for _ in range(4):
        loop.step()
        chosen.append(loop.chosen.clone())
    with torch.no_grad():
        logits = model(loop.fed[:9, :, 0].T).logits
    assert torch.equal(torch.cat(chosen, 1), logits[:, 5:].argmax(-1))
    assert loop.position.item() == 9


def test_sliding_windows_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 30}
    config = MistralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, sliding_window=8)
    with pytest.raises(ValueError, match="sliding window's cache counts tokens in Python"):
        model_decode.DecodeLoop(MistralForCausalLM(config), 1, 4, 4)


def test_blocks_can_be_compiled_whole():
    model = build("qwen3_next", torch.float32, spread=False)
    model = kbit.quantize_model(model, QuantizationPolicy())
    plan = bench.Plan(batches=(1,), prompt=3, steps=2, prefill=0, repeats=1, compiled=True)
    (row,) = (bench._decode(model, "kbit", 1, plan),)
    assert row.ms > 0
    assert row.reason == "no CUDA graphs on cpu"


# -- arms, results, the command ------------------------------------------------------------------------------


def test_the_fastest_16_bit_arm_is_the_baseline():
    rows = [bench.DecodeRow("bf16 grouped_mm", 1, 4.0, 0.0, None), bench.DecodeRow("b", 1, 3.0, 0.0, None)]
    ours = [bench.DecodeRow("kbit k=4", 1, 1.5, 0.0, None), bench.DecodeRow("kbit k=4", 8, 2.0, 0.0, None)]
    results = [bench.ArmResult("kbit k=4", decode=ours), bench.ArmResult("bf16", decode=rows)]
    assert bench.baseline_ms(results) == {1: 3.0}
    written = bench.as_json(results)[0]["decode"]
    assert [row["vs_bf16"] for row in written] == [2.0, None]
    assert [row["tokens_s"] for row in written] == [666.67, 4000.0]


def test_the_peak_kept_is_of_the_way_whose_speed_is_kept(monkeypatch):
    """And each is counted from the way's own beginning."""
    peaks, resets = iter([5, 30, 20, 10, 25]), []  # prefill, then two ways of two batches
    monkeypatch.setattr(bench.machine, "reset_gpu_peak", resets.append)
    monkeypatch.setattr(bench.machine, "gpu_peak_bytes", lambda device: next(peaks))
    monkeypatch.setattr(bench.model_decode, "prefill", lambda *_: model_decode.Timing(1.0, 0.0, None))
    times = {("bf16 grouped_mm", 1): 3.0, ("bf16 batched_mm", 1): 2.0}
    times |= {("bf16 grouped_mm", 4): 2.0, ("bf16 batched_mm", 4): 3.0}

    def decode(model, arm, batch, *more):
        return bench.DecodeRow(arm, batch, times[arm, batch], 0.0, None)

    monkeypatch.setattr(bench, "_decode", decode)
    monkeypatch.setattr(bench, "ways", lambda *_: ("bf16 grouped_mm", "bf16 batched_mm"))
    built, plan = model_build.Built(None, 1, 99), bench.Plan(batches=(1, 4))
    result = bench._run("bf16", built, 1, plan, CPU, lambda words: None)
    assert len(resets) == 5
    assert [row["peak_bytes"] for row in bench.as_json([result])[0]["decode"]] == [30, 20, 10, 25]
    assert (result.prefill_peak_bytes, result.run_peak_bytes, result.build_peak_bytes) == (5, 20, 99)
    assert bench.kept_peak(bench.ArmResult("on a CPU")) is None


@pytest.mark.parametrize("config_file", MIXTURES, indirect=True)
def test_the_command_on_a_cpu(config_file, tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--batch", "1,8", "--prompt", "4", "--steps", "2", "--prefill", "6", "--repeats", "1"]
    command = ["bench", "model", config_file, "--device", "cpu", *sizes, "--profile", "--json", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "kernels of a step" in result.output
    result = json.loads(out.read_text())
    ours, plain = result["arms"]
    assert (ours["name"], plain["name"]) == ("kbit k=4", "bf16")
    assert ours["weight_bytes"] < plain["weight_bytes"]
    assert [row["batch"] for row in ours["decode"]] == [1, 8]
    assert {row["arm"] for row in plain["decode"]} == {"bf16 grouped_mm", "bf16 batched_mm"}
    assert ours["prefill_tokens_s"] > 0
    assert ours["decode"][0]["profile"]["kernels"]
    assert ours["decode"][0]["vs_bf16"] > 0


@pytest.mark.parametrize("config_file", MIXTURES[:1], indirect=True)
def test_what_does_not_fit_in_memory_is_left_out(config_file, tmp_path, monkeypatch):
    own, out = bench._decode, tmp_path / "result.json"

    def decode(model, arm, batch, *more):
        if batch == 4 and arm == "bf16 batched_mm":
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return own(model, arm, batch, *more)

    monkeypatch.setattr(bench, "_decode", decode)
    sizes = ["--batch", "1,4", "--prompt", "4", "--steps", "2", "--prefill", "0", "--repeats", "1"]
    result = CliRunner().invoke(
        app, ["bench", "model", config_file, "--device", "cpu", *sizes, "--json", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "bf16 batched_mm, batch 4: left out" in result.output
    ours, plain = json.loads(out.read_text())["arms"]
    assert (ours["no_memory"], plain["no_memory"]) == ([], ["bf16 batched_mm, batch 4"])
    assert ours["decode"][1]["vs_bf16"] > 0


# -- on a GPU ------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [True, False], ids=["kbit", "bf16"])
@pytest.mark.parametrize("architecture", [*MIXTURES, "llama"])
def test_a_step_is_captured_and_decodes_the_same(architecture, quantized):
    model = build(architecture, torch.bfloat16, spread=False).cuda()
    if quantized:
        kbit.quantize_model(model, QuantizationPolicy())
    choices = []
    for captured in (False, True):
        loop = model_decode.DecodeLoop(model, batch=2, prompt=5, steps=6)
        loop.read_prompt()
        run, reason = loop.step, None
        if captured:
            loop.warm_up()
            run, reason = loop.captured()
            loop.read_prompt()
            loop.rewind()
        assert reason is None
        steps = []
        for _ in range(6):
            run()
            steps.append(loop.chosen.clone())
        choices.append(torch.cat(steps, 1))
    assert torch.equal(*choices)


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--layers", "2", "--prompt", "16", "--steps", "8", "--prefill", "64", "--repeats", "2"]
    command = ["bench", "model", "qwen3-30b-a3b", *sizes, "--profile", "--json", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    arms = json.loads(out.read_text())["arms"]
    assert all(row["reason"] is None for arm in arms for row in arm["decode"])
    assert all(arm["prefill_reason"] is None for arm in arms)
    assert arms[0]["run_peak_bytes"] < arms[1]["run_peak_bytes"]
    one, four = (row["profile"]["by_kind_us"] for row in arms[0]["decode"][:2])
    assert one["kbit"] > 0
    assert one["kbit routing"] > 0
    assert four["kbit routing"] > 0
