"""Trained adapters that are loaded on quantized models: what adapts experts in 16 bits has no place there."""

from __future__ import annotations

import json

import pytest
import torch
from peft import LoraConfig, PeftMixedModel, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file

import kbit
from tiny_models import build

# Of what in an adapter matches nothing.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])
PROJECTIONS = ["gate_proj", "up_proj", "down_proj"]
PLACES = {"all": "all-linear", "parameters": ["q_proj"], "projections": ["q_proj", *PROJECTIONS]}


def quantized(architecture="qwen3_moe"):
    return kbit.quantize_model(build(architecture, torch.float32, False), kbit.KbitConfig(bits=4))


def adapted(model, **options):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, task_type="CAUSAL_LM", **options))


def saved(folder, architecture="qwen3_moe", places="all"):
    """The folder of an adapter that was trained on the model in 16 bits."""
    more = {"target_parameters": ["experts.down_proj"]} if places == "parameters" else {}
    model = adapted(build(architecture, torch.float32, False), target_modules=PLACES[places], **more)
    model.save_pretrained(folder)
    return folder


def of_single_experts(folder):
    """Rewrite an adapter as it was saved when models had experts as modules."""
    path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    tensors = {name: one for name, one in load_file(path).items() if "self_attn" in name}
    for expert in range(4):
        for name, sizes in {"gate_proj": (48, 24), "up_proj": (48, 24), "down_proj": (24, 48)}.items():
            inside = f"base_model.model.model.layers.0.mlp.experts.{expert}.{name}"
            tensors[f"{inside}.lora_A.weight"] = torch.randn(4, sizes[0])
            tensors[f"{inside}.lora_B.weight"] = torch.randn(sizes[1], 4)
    save_file(tensors, path, {"format": "pt"})
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *PROJECTIONS]
    stated = {"target_modules": targets, "target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}
    config.write_text(json.dumps(json.loads(config.read_text()) | stated))
    return folder


def by_transformers(model, folder):
    model.load_adapter(folder)
    return model


LOADS = {
    "peft": PeftModel.from_pretrained,
    "mixed": PeftMixedModel.from_pretrained,
    "transformers": by_transformers,
}
BY = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def refused():
    """What an adapter cannot do, and what to do about it."""
    pattern = r'weights of it cannot be applied: \S*layers\.0\.mlp\.experts\..*quantize the.*"experts"'
    return pytest.raises(kbit.KbitError, match=pattern)


def state(model):
    return {name: (type(module), len(module._forward_hooks)) for name, module in model.named_modules()}


@BY
@pytest.mark.parametrize("places", PLACES)
def test_adapters_of_16_bit_experts_are_refused_and_leave_no_trace(load, places, tmp_path):
    folder, model = saved(tmp_path, places=places), quantized()
    before, want = state(model), model(IDS).logits
    with refused():
        load(model, folder)
    assert state(model) == before
    assert torch.equal(model(IDS).logits, want)
    kbit.quantize_model(model, kbit.KbitConfig(bits=4))  # which refuses models with adapters
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


@BY
def test_so_are_those_of_releases_that_had_a_module_for_each_expert(load, tmp_path):
    with refused():
        load(quantized(), of_single_experts(saved(tmp_path)))


@BY
def test_so_are_those_of_models_whose_files_have_other_names(load, tmp_path):
    with refused():
        load(quantized("mixtral"), saved(tmp_path, "mixtral"))


@BY
def test_adapters_that_were_there_before_stay(load, tmp_path):
    dense = adapted(quantized(), target_modules=["q_proj"])
    dense.save_pretrained(tmp_path / "dense")
    folder, model = saved(tmp_path / "experts"), load(quantized(), tmp_path / "dense")
    want = model(IDS).logits
    with refused():
        model.load_adapter(folder, adapter_name="other")
    assert [*model.peft_config] == ["default"]
    assert not any("other" in name for name, _ in model.named_parameters())
    assert torch.equal(model(IDS).logits, want)


@BY
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "experts"]], ids=str)
def test_adapters_of_the_quantized_model_are_loaded(load, targets, tmp_path):
    trained = adapted(quantized(), target_modules=targets)
    trained.save_pretrained(tmp_path)
    assert torch.equal(load(quantized(), tmp_path)(IDS).logits, trained(IDS).logits)


@BY
def test_experts_that_stay_in_16_bits_take_their_adapters(load, tmp_path):
    folder, dense = saved(tmp_path), build("qwen3_moe", torch.float32, False)
    model = kbit.quantize_model(dense, kbit.KbitConfig(bits=4, overrides={r"experts$": 0}))
    plain = model(IDS).logits
    loaded = load(model, folder)
    adapted_ones = {name for name, one in loaded.named_modules() if isinstance(one, BaseTunerLayer)}
    assert any(name.endswith("layers.0.mlp.experts") for name in adapted_ones)
    assert not torch.allclose(loaded(IDS).logits, plain, atol=1e-3)
