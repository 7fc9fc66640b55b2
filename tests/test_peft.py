"""LoRA with peft on quantized layers: exact forward and gradients, training, adapters on disk, merging."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftMixedModel,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from torch.autograd import forward_ad
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import kbit
from kbit.integrations.peft import merge
from kbit.nn import KbitExperts, KbitLinear
from kbit.nn.replace import quantize_model
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])
TARGETS = ["q_proj", "o_proj", "experts"]


def quantized(architecture="qwen3_moe", dtype=torch.float32, spread=True, **config):
    return quantize_model(build(architecture, dtype, spread), kbit.KbitConfig(bits=4, **config))


def adapted(model, **options):
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**settings))


def lora_layers(model):
    return {n: m for n, m in model.named_modules() if hasattr(m, "base_layer") and hasattr(m, "lora_A")}


def test_layers_of_kbit_are_adapted():
    kinds = {type(m).__name__ for m in lora_layers(adapted(quantized())).values()}
    assert kinds == {"LoraLinear", "LoraKbitExperts"}


def test_a_model_without_adapters_is_not_merged():
    with pytest.raises(TypeError, match="Linear is no peft model"):
        merge(torch.nn.Linear(2, 2))


def test_a_fresh_adapter_changes_nothing():
    model = quantized()
    expected = model(IDS).logits.detach()
    # Not bit for bit: with gradients, sums are in another order and silu is a step of its own.
    torch.testing.assert_close(adapted(model, init_lora_weights=True)(IDS).logits, expected)


@pytest.mark.parametrize("spread", [False, True])  # True: gate and up have factors of their own
def test_experts_forward_and_gradients_equal_dense_ones(spread):
    model = adapted(quantized(spread=spread))
    lora = next(m for m in lora_layers(model).values() if isinstance(m.base_layer, KbitExperts))
    base = lora.base_layer
    x = torch.randn(7, base.hidden_dim, requires_grad=True)
    chosen = torch.tensor([[0, 1], [1, 3], [3, 0], [0, 1], [1, 0], [3, 1], [0, 3]])  # expert 2 has no row
    weights = torch.rand(7, 2)
    y = lora(x, chosen, weights)
    y.square().sum().backward()
    got = [x.grad.clone()] + [p.grad.clone() for n, p in lora.named_parameters() if "lora_" in n]

    x.grad = None
    lora.zero_grad()
    full = {n: base.dequantize(n) + lora_delta(lora, n) for n in ("gate_up_proj", "down_proj")}
    expected = torch.zeros_like(x)
    for token in range(7):
        for slot in range(2):
            e = chosen[token, slot]
            gate, up = (full["gate_up_proj"][e] @ x[token]).chunk(2)
            out = full["down_proj"][e] @ (F.silu(gate) * up)
            expected = expected.index_add(0, torch.tensor([token]), (weights[token, slot] * out)[None])
    expected.square().sum().backward()
    wanted = [x.grad] + [p.grad for n, p in lora.named_parameters() if "lora_" in n]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_experts_refuse_choices_of_other_tokens():
    model = adapted(quantized())
    name, lora = next((n, m) for n, m in lora_layers(model).items() if isinstance(m.base_layer, KbitExperts))
    x, chosen = torch.randn(3, lora.base_layer.hidden_dim), torch.zeros(4, 2, dtype=torch.int64)
    where = re.escape(name.removeprefix("base_model.model."))
    with pytest.raises(ValueError, match=rf"got \(3, 48\), \(4, 2\) and \(4, 2\) \({where}\)"):
        lora(x, chosen, torch.rand(4, 2))


def test_experts_refuse_forward_mode():
    lora = next(
        m for m in lora_layers(adapted(quantized())).values() if isinstance(m.base_layer, KbitExperts)
    )
    x = torch.randn(1, lora.base_layer.hidden_dim)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match="experts: has no forward-mode derivative"):
            lora(dual, torch.zeros(1, 2, dtype=torch.int64), torch.rand(1, 2))


def lora_delta(lora, name):
    short = {"gate_up_proj": "gate_up", "down_proj": "down"}[name]
    return lora.lora_B["default"][short] @ lora.lora_A["default"][short] * lora.scaling["default"]


def test_linear_gradients_equal_dense_ones():
    layer = KbitLinear.from_linear(torch.nn.Linear(64, 48), bits=4)
    host = torch.nn.Module()
    host.q_proj = layer
    host.forward = lambda x: host.q_proj(x)
    model = adapted(host, target_modules=["q_proj"])
    lora = model.base_model.model.q_proj
    x = torch.randn(5, 64, requires_grad=True)
    lora(x).square().sum().backward()
    got = x.grad.clone()
    x.grad = None
    weight = layer.dequantize() + lora.get_delta_weight("default")
    F.linear(x, weight, layer.bias).square().sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=1e-4, atol=1e-4)


def train(model, steps=8, ids=IDS, autocast=False, rate=0.02):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def frozen(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("checkpointing", "autocast"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_loss_falls_and_the_base_is_frozen(checkpointing, autocast, dtype):
    model = adapted(quantized(dtype=dtype), init_lora_weights=True)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model.train()
    before = frozen(model)
    assert any("experts" in name and name.endswith("_packed") for name in before)
    losses = train(model, autocast=autocast)
    assert losses[-1] < losses[0] - 0.3
    after = frozen(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "lora_" not in n)


def test_checkpointing_gives_the_same_gradients():
    model = adapted(quantized())
    grads = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_autocast_computes_in_its_dtype():
    lora = next(iter(lora_layers(adapted(quantized())).values()))
    with torch.autocast("cpu", torch.bfloat16):
        assert lora(torch.randn(2, lora.in_features)).dtype == torch.bfloat16


def test_no_16_bit_weight_is_saved_for_backward():
    model = adapted(quantized(dtype=torch.bfloat16)).train()
    shapes = {
        tuple(s)
        for m in model.modules()
        if isinstance(m, KbitLinear | KbitExperts)
        for s in m.shapes.values()
    }
    # Of unquantized layers, such as the head, 16-bit weights and their transposes are there anyway.
    shapes -= {s for p in model.parameters() if p.dim() > 1 for s in (tuple(p.shape), tuple(p.mT.shape))}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(IDS, labels=IDS).loss.backward()
    # A decoded weight, or its transpose.
    assert not [
        t.shape
        for t in kept
        if t.is_floating_point() and shapes & {tuple(t.shape), (*t.shape[:-2], *t.shape[:-3:-1])}
    ]


def test_adapters_save_and_load(tmp_path):
    model = adapted(quantized())
    train(model, steps=2)
    model.eval()
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    again = PeftModel.from_pretrained(quantized(), tmp_path)
    assert {type(m).__name__ for m in lora_layers(again).values()} == {"LoraLinear", "LoraKbitExperts"}
    assert torch.equal(again.eval()(IDS).logits, expected)
    with again.disable_adapter():
        assert torch.equal(again(IDS).logits, quantized()(IDS).logits)


def test_two_adapters():
    model = adapted(quantized())
    first = model(IDS).logits
    torch.manual_seed(7)
    options = {"r": 2, "target_modules": TARGETS, "init_lora_weights": False}
    model.add_adapter("other", LoraConfig(**options))
    assert torch.equal(model(IDS).logits, first)
    model.set_adapter("other")
    assert not torch.equal(model(IDS).logits, first)


@pytest.mark.parametrize("call", ["merge_adapter", "merge_and_unload"])
def test_merging_into_codes_is_refused_with_the_remedy(call):
    model = adapted(quantized())
    with pytest.raises(ValueError, match=r"q_proj.*cannot be merged into codes.*integrations\.peft\.merge"):
        getattr(model, call)()


@pytest.mark.parametrize(
    ("wrap", "config"),
    [
        (get_peft_model, IA3Config(target_modules=["k_proj"], feedforward_modules=[])),
        (PeftMixedModel, LoHaConfig(target_modules=["k_proj"])),
    ],
    ids=["IA3", "mixed LoHa"],
)
def test_adapters_that_are_not_lora_leave_codes_alone(wrap, config):
    base = quantized("llama")
    before = {key: value.clone() for key, value in base.state_dict().items()}
    model = wrap(base, config, "default")
    for call in (model.base_model.merge_adapter, model.merge_and_unload, lambda: merge(model)):
        with pytest.raises(ValueError, match=r"k_proj.*would write into its codes. Keep the adapter beside"):
            call()
    after = model.unload().state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig])
def test_prompts_are_learned_in_front_of_a_quantized_table(kind):
    model = get_peft_model(
        quantized("llama", embedding_bits=4), kind(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    assert model.word_embeddings is model.base_model.model.embed_tokens
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert gradients
    with pytest.raises(ValueError, match="puts tokens in front of a prompt, which no weight can do"):
        merge(model)
    assert all(gradient.abs().sum() > 0 for gradient in gradients)
    assert "get_submodule" not in vars(model.base_model.model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adaption_prompts_are_learned_in_front_of_quantized_projections(dtype):
    base = quantized("llama").to(dtype)
    base.config.dtype = dtype
    config = AdaptionPromptConfig(adapter_len=3, adapter_layers=1, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    prompts = {name: one for name, one in model.named_parameters() if one.requires_grad}
    assert prompts
    assert {one.dtype for one in prompts.values()} == {dtype}
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(one.grad is not None for one in prompts.values())


def test_unloading_gives_the_base_back():
    base = quantized()
    expected = base(IDS).logits
    assert torch.equal(adapted(base).unload()(IDS).logits, expected)


def test_layers_in_wrappers_are_not_saved_by_names_that_no_model_has(tmp_path, monkeypatch):
    # transformers 5.24 asks for peft 0.22, before that was out.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21.0")
    model = quantized("llama")
    model.add_adapter(LoraConfig(target_modules=["q_proj"]))
    model.delete_adapter("default")
    with pytest.raises(ValueError, match=r"q_proj\.base_layer is inside a wrapper of peft's"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_layers_in_nvfp4_get_no_adapter(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=72, **sizes)).save_pretrained(tmp_path)
    config = kbit.NVFP4Config(activations="16bit")
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.q_proj is in NVFP4, .* Quantize the model by"
    ):
        get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


def test_merging_requantizes():
    model = adapted(quantized())
    expected = model(IDS).logits
    merged = merge(model)
    assert not lora_layers(merged)
    assert type(merged.model.layers[0].mlp.experts) is KbitExperts
    # Requantizing rounds each weight once more: 4 bits, about 8% of its standard deviation.
    error = (merged(IDS).logits - expected).norm() / expected.norm()
    assert error < 0.25


@pytest.mark.parametrize("requantize", [True, False])
def test_merging_ignores_autocast(requantize):
    results = []
    for autocast in (False, True):
        model = adapted(quantized("llama"), target_modules=["q_proj"])
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results.append(merge(model, requantize).state_dict())
    for name, expected in results[0].items():
        assert torch.equal(results[1][name], expected), name


def test_merging_to_16_bits_saves_and_reloads(tmp_path):
    build("llama", torch.float32).save_pretrained(tmp_path / "source")
    base = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=kbit.KbitConfig(bits=4)
    )
    model = adapted(base, target_modules=["q_proj", "down_proj"])
    expected = model(IDS).logits
    merged = merge(model, requantize=False)
    assert type(merged.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert type(merged.model.layers[0].self_attn.k_proj) is KbitLinear
    torch.testing.assert_close(merged(IDS).logits, expected, rtol=1e-3, atol=1e-3)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(again(IDS).logits, merged(IDS).logits)


def test_merging_all_layers_to_16_bits_leaves_a_plain_model(tmp_path):
    merged = merge(adapted(quantized("llama"), target_modules="all-linear"), requantize=False)
    merged.save_pretrained(tmp_path)
    assert "quantization_config" not in (tmp_path / "config.json").read_text()
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(IDS).logits, merged(IDS).logits)


@pytest.mark.parametrize("loaded", [False, True])
def test_adapters_of_weights_the_other_way_round_are_merged(loaded, tmp_path):
    """peft resets `fan_in_fan_out` on layers that are none; v_proj is not square, q_proj is."""
    options = {"target_modules": ["q_proj", "v_proj"], "fan_in_fan_out": True}
    with pytest.warns(UserWarning, match=r"target module is `kbit\.nn\.KbitLinear`\. Setting fan_in_fan_out"):
        model = adapted(quantized("qwen3"), **options)
    assert not model.peft_config["default"].fan_in_fan_out
    if loaded:
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "adapter_config.json").read_text())
        (tmp_path / "adapter_config.json").write_text(json.dumps(saved | {"fan_in_fan_out": True}))
        with pytest.warns(UserWarning, match="Setting fan_in_fan_out to False"):
            model = PeftModel.from_pretrained(quantized("qwen3"), tmp_path)
    expected = model.eval()(IDS).logits
    torch.testing.assert_close(merge(model, requantize=False)(IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("requantize", [True, False])
def test_biases_of_adapters_are_merged(requantize):
    model = adapted(quantized("qwen3"), target_modules=["q_proj"], lora_bias=True)
    for layer in lora_layers(model).values():
        layer.lora_B["default"].bias.data.fill_(0.25)
    before = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.bias.clone()
    merged = merge(model, requantize)
    after = merged.model.layers[0].self_attn.q_proj.bias
    torch.testing.assert_close(after, before + 0.25 * 8 / 4)


def test_biases_that_have_no_place_are_refused():
    model = adapted(quantized(), target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ValueError, match=r"q_proj: the adapter has a bias and the layer none"):
        merge(model)
    with pytest.raises(ValueError, match=r"experts: adapters of fused experts have no bias"):
        adapted(quantized(), lora_bias=True)


def test_experts_do_not_merge_to_16_bits():
    model = adapted(quantized())
    with pytest.raises(ValueError, match=r"experts: fused experts cannot be left in 16 bits"):
        merge(model, requantize=False)
    assert lora_layers(model)  # nothing has changed


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}]
)
def test_what_needs_the_16_bit_weight_is_refused(options):
    with pytest.raises(ValueError, match="quantized"):
        adapted(quantized(), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["mlp.down_proj"]},
        {"modules_to_save": ["mlp"]},
        {"trainable_token_indices": [1, 2]},
        {"trainable_token_indices": {"embed_tokens": [1]}},
    ],
    ids=str,
)
def test_codes_are_not_trained_themselves(options):
    (option, _), *_ = options.items()
    where = rf"{option}: \S+ (holds \S+, which )?is quantized"
    with pytest.raises(ValueError, match=rf"{where}.*LoRA.*overrides=.* 0}}") as refused:
        adapted(quantized("llama", embedding_bits=4), target_modules=["q_proj"], **options)
    (remedy,) = re.findall(r"overrides=(\{.*\})", str(refused.value))
    model = quantized("llama", embedding_bits=4, overrides=ast.literal_eval(remedy))
    assert adapted(model, target_modules=["q_proj"], **options)


def test_all_linear_reaches_quantized_layers():
    model = adapted(quantized("llama"), target_modules="all-linear")
    names = {name.rpartition(".")[2] for name in lora_layers(model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"]])
def test_targets_that_leave_experts_out_say_so(targets):
    with pytest.warns(UserWarning, match=r'adapt no quantized experts.* Put "experts" among'):
        adapted(quantized(), target_modules=targets)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*adapt no quantized experts")
        adapted(quantized(), target_modules=TARGETS)
        adapted(quantized("llama"), target_modules=targets)


def test_peft_may_be_imported_before_kbit():
    program = "import peft, kbit; print(peft.LoraConfig()._custom_modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "LoraKbitExperts" in result.stdout
    program = "import sys, kbit; sys.exit('peft' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(
    not (os.environ.get("KBIT_TEST_MODEL") and os.environ.get("KBIT_TEST_TEXT")),
    reason="KBIT_TEST_MODEL and KBIT_TEST_TEXT name no unquantized model and held-out text",
)
def test_the_example_trains_a_real_model(tmp_path):
    example = Path(__file__).parents[1] / "examples" / "lora.py"
    text = tmp_path / "text.txt"  # of as many tokens as a batch takes, so that every step sees the same
    text.write_text(Path(os.environ["KBIT_TEST_TEXT"]).read_text()[:500])
    options = ["--steps", "4", "--tokens", "64", "--batch", "2", "--out", str(tmp_path / "adapter")]
    program = [
        sys.executable,
        str(example),
        os.environ["KBIT_TEST_MODEL"],
        str(text),
        *options,
    ]
    result = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()


def test_bench_train_runs(tmp_path):
    from typer.testing import CliRunner

    from kbit.cli import app
    from tiny_models import ARCHITECTURES

    config = tmp_path / "tiny.json"
    config.write_text(ARCHITECTURES["qwen3_moe"]().to_json_string(use_diff=False))
    out = tmp_path / "train.json"
    options = ["--device", "cpu", "--tokens", "32", "--rank", "4", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "train", str(config), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    arms = {arm["name"]: arm for arm in json.loads(out.read_text())["arms"]}
    assert list(arms) == ["bf16", "kbit k=4"]
    assert arms["bf16"]["time_vs_bf16"] == 1
    assert arms["kbit k=4"]["weights_vs_bf16"] < 1
    assert all(arm["last_loss"] < arm["first_loss"] and arm["peak_bytes"] > 0 for arm in arms.values())


def test_a_model_with_adapters_is_not_quantized():
    model = adapted(build("llama", torch.float32, spread=False))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="has an adapter, which would be quantized, too. Merge it or take"):
        quantize_model(model, kbit.KbitConfig(bits=4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
