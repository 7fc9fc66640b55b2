"""vLLM runs k-bit checkpoints: answers as of the decoded model, ranks, adapters, and what is refused.

In an environment of its own, with vLLM's build for CPUs: make test-vllm.
"""

import functools
import json
import os
import shutil
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")
os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process, so that its errors arrive here
    VLLM_LOGGING_LEVEL="WARNING",
)

import torch
from transformers import AutoConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import WeightsMapper

import kbit
import tiny_models
import vllm_models
from kbit.format.checkpoint import parts_to_save
from kbit.integrations import vllm as plugin
from kbit.integrations.vllm import parameters
from kbit.integrations.vllm.config import KbitVllmConfig
from kbit.integrations.vllm.decoding import decode
from kbit.integrations.vllm.linear import runs
from kbit.nn.parts import QuantizedModule


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(quantized, decoded) folders of an architecture; made once."""
    made = {}

    def folders(architecture):
        if architecture not in made:
            made[architecture] = vllm_models.save(architecture, tmp_path_factory.mktemp(architecture))
        return made[architecture]

    return folders


@pytest.fixture(scope="module")
def answers():
    """What vLLM answers by a folder, in float32 and one layer after the other; asked for once."""
    return functools.cache(vllm_models.run)


def require_same(mine, theirs, bound):
    for (tokens, logs), (other_tokens, other_logs) in zip(mine, theirs, strict=True):
        assert tokens == other_tokens
        assert logs == pytest.approx(other_logs, abs=bound)


# vLLM's Qwen3.5 imports torchvision, of which PyPI has no build for a torch without CUDA.
@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [name for name in tiny_models.ARCHITECTURES if name != "qwen3_5_moe"]
)
def test_answers_are_those_of_the_decoded_model(architecture, saved, answers):
    # vLLM's linear attention for CPUs knows bfloat16 alone, in which the decoded weights are rounded; of its
    # two kinds of latent attention the one for CPUs with AMX, which it prefers, does not know float32.
    options = {"qwen3_next": {"dtype": "bfloat16"}, "glm4_moe_lite": {"attention_backend": "CPU_MLA"}}
    bound = 3e-2 if architecture == "qwen3_next" else 1e-5
    mine, theirs = (answers(folder, **options.get(architecture, {})) for folder in saved(architecture))
    require_same(mine, theirs, bound)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_models_of_transformers_run_in_vllm_alike(architecture, saved):
    quantized, decoded = saved(architecture)
    own = {"model_impl": "transformers"}
    require_same(vllm_models.run(quantized, **own), vllm_models.run(decoded, **own), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True], ids=["split by columns", "whole experts"])
def test_two_ranks_answer_as_one(experts, saved, answers):
    quantized, _ = saved("qwen3_moe")
    split = vllm_models.run(quantized, tensor_parallel_size=2, enable_expert_parallel=experts)
    require_same(split, answers(quantized), 1e-5)


@pytest.mark.slow
def test_compiled_layers_answer_alike(saved, answers, tiles_pay):
    quantized, decoded = saved("qwen3_moe")
    require_same(vllm_models.run(quantized, enforce_eager=False), answers(decoded), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "llama"])
def test_weights_in_tiles_answer_alike(architecture, saved, answers, tiles_pay, monkeypatch):
    tiled = []
    to_tiles = QuantizedModule._to_tiles
    monkeypatch.setattr(
        QuantizedModule,
        "_to_tiles",
        lambda self, name, *parts: tiled.append(name) or to_tiles(self, name, *parts),
    )
    quantized, decoded = saved(architecture)
    require_same(vllm_models.run(quantized), answers(decoded), 1e-5)
    assert set(tiled) == ({"weight", "gate_up_proj", "down_proj"} if "moe" in architecture else {"weight"})


@pytest.mark.slow
def test_an_adapter_gives_what_it_gives_in_peft(saved, tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM
    from vllm.lora.request import LoRARequest

    quantized, _ = saved("qwen3")
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    config = LoraConfig(r=8, target_modules=targets, init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(quantized, dtype=torch.float32), config)
    model.save_pretrained(tmp_path)
    expected = []
    for prompt in vllm_models.PROMPTS:
        ids = torch.tensor([prompt])
        tokens = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected.append(tokens[0, len(prompt) :].tolist())
    request = LoRARequest("adapter", 1, str(tmp_path))
    answers = vllm_models.run(quantized, adapter=request, enable_lora=True, max_lora_rank=8)
    assert [tokens for tokens, _ in answers] == expected


@pytest.mark.slow
def test_adapters_of_attention_run_beside_experts(saved, answers):
    quantized, _ = saved("qwen3_moe")
    with pytest.raises(
        ValueError, match=r"mlp\.experts.*: vLLM runs no adapters of experts.*lora-target-modules"
    ):
        vllm_models.run(quantized, enable_lora=True)
    named = {"enable_lora": True, "lora_target_modules": ["qkv_proj", "o_proj"]}
    require_same(vllm_models.run(quantized, **named), answers(quantized), 1e-5)


@pytest.mark.slow
def test_weights_are_not_loaded_into_a_running_engine(saved):
    with pytest.raises(NotImplementedError, match="cannot be loaded into a running vLLM engine"):
        vllm_models.run(saved("llama")[0], between=lambda llm: llm.collective_rpc("reload_weights"))


@pytest.mark.slow
def test_experts_that_files_hold_fused(saved, answers, tmp_path):
    quantized, _ = saved("qwen3_moe")
    mine = vllm_models.run(vllm_models.fuse_experts(quantized, tmp_path / "fused", factor=None))
    assert [tokens for tokens, _ in mine] != [tokens for tokens, _ in answers(quantized)]  # other factors
    ones = vllm_models.run(vllm_models.fuse_experts(quantized, tmp_path / "ones", factor=1.0))
    require_same(ones, mine, 1e-5)
    halves = vllm_models.run(vllm_models.fuse_experts(quantized, tmp_path / "halves", factor=0.5))
    assert [logs for _, logs in halves] != [logs for _, logs in mine]


@pytest.mark.slow
def test_a_head_of_its_own_in_a_tied_config(saved, answers, tmp_path):
    quantized, _ = saved("qwen3")
    shutil.copytree(quantized, tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": True}))
    require_same(vllm_models.run(tmp_path / "model"), answers(quantized), 1e-5)


@pytest.mark.slow
def test_drawn_weights_need_no_tensors(saved):
    quantized, _ = saved("qwen3_moe")
    assert len(vllm_models.run(quantized, load_format="dummy")) == len(vllm_models.PROMPTS)


@pytest.mark.slow
def test_embeddings_of_a_model_whose_head_is_dropped(saved):
    quantized, decoded = saved("llama")
    mine, theirs = (vllm_models.pool(one, "embed", convert="embed") for one in (quantized, decoded))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_reranker_whose_head_is_made_while_it_loads(saved):
    to_classes = {
        "architectures": ["LlamaForSequenceClassification"],
        "classifier_from_token": ["5", "9"],
        "method": "from_2_way_softmax",
        "num_labels": 1,
    }
    options = {"convert": "classify", "hf_overrides": to_classes}
    mine, theirs = (vllm_models.pool(one, "classify", **options) for one in saved("llama"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_model_without_a_head_stays_quantized(tmp_path, monkeypatch):
    plain = []
    find = KbitVllmConfig.plain_modules
    monkeypatch.setattr(
        KbitVllmConfig, "plain_modules", lambda *given: plain.append(find(*given)) or plain[-1]
    )
    quantized, decoded = vllm_models.save("qwen3", tmp_path, headless=True)
    mine, theirs = (vllm_models.pool(one, "embed") for one in (quantized, decoded))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert plain[0] == {}


@pytest.mark.slow
def test_layers_of_several_widths_hold_their_own_bytes(saved):
    def held(llm):
        (sizes,) = llm.collective_rpc(vllm_models.packed_bytes)
        assert sizes
        assert all(bytes_ == storage for bytes_, storage in sizes)

    vllm_models.run(saved("qwen3")[0], between=held)


@pytest.mark.slow
def test_what_is_not_quantized_is_not_served_as_if(saved):
    with pytest.raises(ValueError, match=r"no quantization_config.*kbit quantize MODEL OUT"):
        vllm_models.run(saved("llama")[1], quantization="kbit")


def test_vllm_finds_the_plugin():
    (entry,) = entry_points(group="vllm.general_plugins", name="kbit")
    assert entry.load() is plugin.register


def test_a_vllm_that_is_too_old_is_said(monkeypatch, caplog):
    import sys

    monkeypatch.setitem(sys.modules, "kbit.integrations.vllm.config", None)
    monkeypatch.delattr(plugin, "config", raising=False)
    plugin.register()
    assert "needs vLLM 0.32 or newer" in caplog.text


# -- one at a time -------------------------------------------------------------------------------------------


@pytest.fixture
def config(saved):
    made = KbitVllmConfig.from_config(kbit.KbitConfig(**vllm_models.POLICY).to_dict())
    folder = str(saved("qwen3")[0])
    made.maybe_update_config(folder, AutoConfig.from_pretrained(folder))
    return made


def test_widths_come_from_the_files(config):
    attention = "model.layers.0.self_attn"
    assert config.widths[f"{attention}.k_proj"] == 5
    assert config.widths["model.layers.1.mlp.down_proj"] == 3
    assert config._widths_of(f"{attention}.qkv_proj") == [4, 5, 4]
    assert config._widths_of("model.layers.0.mlp.gate_up_proj") == [4, 4]
    assert config._widths_of("model.layers.0.mlp.router") == []
    assert "model.layers.1.mlp.down_proj" not in config.taken


def test_models_call_modules_otherwise(config):
    renamed = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=renamed))
    config.apply_vllm_mapper(WeightsMapper())  # that of a model inside
    assert config._widths_of("language_model.model.layers.0.self_attn.qkv_proj") == [4, 5, 4]
    assert config._width_of("language_model.lm_head") == 5
    assert {"model.layers.0.self_attn.k_proj", "lm_head"} <= config.taken


def test_headers_of_a_checkpoint_on_a_hub(config, saved, monkeypatch):
    from vllm.transformers_utils import config as vllm_config

    folder = str(saved("qwen3")[0])
    headers = vllm_config.get_safetensors_params_metadata(folder)
    monkeypatch.setattr(vllm_config, "get_safetensors_params_metadata", lambda model, revision: headers)
    made = KbitVllmConfig.from_config(kbit.KbitConfig(**vllm_models.POLICY).to_dict())
    made.maybe_update_config("someone/a-model")
    assert (made.widths, made.factors) == (config.widths, config.factors)
    headers.clear()
    with pytest.raises(ValueError, match=r"someone/a-model: the headers .* cannot be read"):
        made.maybe_update_config("someone/a-model")


def test_a_merged_layer_is_quantized_whole_or_not_at_all(config):
    del config.names["model.layers.0.self_attn.v_proj"]
    message = r"qkv_proj: vLLM merges .*v_proj into one layer, and .*\.v_proj is not quantized"
    with pytest.raises(ValueError, match=message):
        config._widths_of("model.layers.0.self_attn.qkv_proj")


def test_factors_that_a_model_would_take_apart(config, saved):
    from transformers import BloomConfig

    folder = str(saved("qwen3")[0])
    assert config.factors
    config._refuse_repacked(BloomConfig())  # of other layers
    config.factors.add("transformer.h.0.self_attention.query_key_value.weight_scale")
    config._refuse_repacked(AutoConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match=r"h\.0.*BLOOM.*modules_to_not_convert=\['query_key_value'\]"):
        config._refuse_repacked(BloomConfig())


def test_neighbours_of_equal_width_and_factor_are_one_product():
    assert runs([64, 32, 32], [1.0, 1.0, 1.0], [4, 4, 4]) == [(slice(0, 128), 1.0, 4)]
    found = runs([64, 32, 32], [1.0, 1.0, 2.0], [4, 5, 5])
    assert found == [(slice(0, 64), 1.0, 4), (slice(64, 96), 1.0, 5), (slice(96, 128), 2.0, 5)]


def test_blocks_are_not_split_over_ranks():
    parameters.refuse_split_blocks(64, 128, "mlp.down_proj")
    parameters.refuse_split_blocks(40, 40, "mlp.down_proj")
    message = r"mlp\.down_proj: 96 in-features over 2 ranks are 48 each.*Use fewer GPUs"
    with pytest.raises(ValueError, match=message):
        parameters.refuse_split_blocks(48, 96, "mlp.down_proj")


def test_weights_that_did_not_come_are_named():
    filling = parameters.Filling(lambda *_: None)
    filling(None, torch.zeros(2, 4), "q")
    filling(None, torch.zeros(2, 4), "k")
    with pytest.raises(ValueError, match=r"qkv_proj: 2 of 3 quantized weights came from the checkpoint"):
        filling.refuse_missing(3, "qkv_proj")
    filling(None, torch.zeros(2, 4), "v")
    filling.refuse_missing(3, "qkv_proj")


def test_experts_of_other_ranks_count_for_nothing():
    filling = parameters.ExpertsFilling(lambda *arguments: arguments[4] < 2)
    loads = [(shard, expert) for expert in (1, 2, 3) for shard in ("w1", "w2", "w3")]
    taken = [filling(None, torch.zeros(2, 4), "name", *load, return_success=True) for load in loads]
    assert taken == [True] * 3 + [False] * 6
    with pytest.raises(ValueError, match="3 of 6 quantized weights came"):
        filling.refuse_missing(6, "mlp.experts")


@pytest.mark.slow
def test_a_checkpoint_without_one_expert_is_refused(saved, tmp_path):
    from safetensors.torch import load_file, save_file

    shutil.copytree(saved("mixtral")[0], tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if ".experts.1.w3." not in name}
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"experts.*: 11 of 12 quantized weights came from the checkpoint"):
        vllm_models.run(tmp_path / "model")


def test_a_folder_that_is_no_checkpoint_is_refused(saved, tmp_path):
    made = KbitVllmConfig.from_config({"quant_method": "kbit", "bits": 4})
    with pytest.raises(ValueError, match="safetensors"):
        made.maybe_update_config(str(tmp_path))
    with pytest.raises(ValueError, match=r"no tensor is called \*_packed"):
        made.maybe_update_config(str(saved("qwen3")[1]))


def test_other_ways_of_dealing_tokens_are_refused():
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config

    from kbit.integrations.vllm.experts import _refuse_settings

    ranks = {"use_all2all_kernels": True, "all2all_backend": "deepep_low_latency"}
    moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(**ranks, use_ag_rs_all2all_kernels=False))
    message = r"allgather_reducescatter, got deepep_low_latency"
    with set_current_vllm_config(VllmConfig()), pytest.raises(ValueError, match=message):
        _refuse_settings(moe, "mlp.experts")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"activation": "swiglustep"}, "their activation is swiglustep"),
        ({"has_bias": True}, "they have biases"),
        ({"apply_router_weight_on_input": True}, "the router's weights multiply their inputs"),
        ({"swiglu_limit": 7.0}, "their activation is limited"),
    ],
)
def test_other_experts_are_refused(change, reason):
    from types import SimpleNamespace

    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from kbit.integrations.vllm.experts import _refuse_others

    settings = {"activation": "silu", "has_bias": False, "apply_router_weight_on_input": False, **change}
    settings["activation"] = MoEActivation(settings["activation"])
    both = SimpleNamespace(**settings)
    with pytest.raises(ValueError, match=rf"mlp\.experts: .*: {reason}\. Leave them unquantized"):
        _refuse_others(both, both, "mlp.experts")


# -- decoding while loading ----------------------------------------------------------------------------------


def test_parts_become_weights_in_any_order():
    policy = kbit.KbitConfig(bits=4)
    w = torch.randn(8, 40) * 2.0**-12  # outside E4M4's range: it has a factor
    q = kbit.quantize(w, bits=4)
    parts = parts_to_save("head.weight", q)
    assert "head.weight_scale" in parts
    others = {"mlp.weight_packed": torch.zeros(1, dtype=torch.int32), "norm.weight": torch.ones(2)}
    for names in (list(parts), list(parts)[::-1]):
        stream = [(name, parts[name]) for name in names] + list(others.items())
        found = dict(decode(stream, {"head": 40}, policy, {"head.weight_scale"}, torch.float32))
        assert torch.equal(found.pop("head.weight"), kbit.dequantize(q))
        assert found == others


def test_columns_that_nobody_knows_are_whole_blocks():
    q = kbit.quantize(torch.randn(2, 4, 64), bits=3)
    stream = parts_to_save("moe.input_linear.weight", q).items()
    (found,) = decode(stream, {"moe.input_linear": None}, kbit.KbitConfig(bits=3), set(), torch.bfloat16)
    assert torch.equal(found[1], kbit.dequantize(q, torch.bfloat16))


def test_only_what_no_layer_took_is_decoded(config):
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.embed_tokens = torch.nn.Embedding(72, 64)
    drafts = ("mtp.layers.0.mlp.up_proj", "model.layers.2.mlp.up_proj")  # the model has layers 0 and 1
    config.widths.update(dict.fromkeys(drafts, 4))
    assert set(config.plain_modules(model)) == set(config.widths) - set(drafts)
    config.taken.update(config.widths)
    assert config.plain_modules(model) == {"model.embed_tokens": 64}


def test_the_loader_decodes_once():
    plugin.register()
    loader = DefaultModelLoader.get_all_weights
    plugin.register()
    assert loader.knows_kbit
    assert DefaultModelLoader.get_all_weights is loader
