"""What is quantized, loaded or decoded within `torch.inference_mode` can be trained and written to."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import kbit
from kbit.integrations.nvfp4 import NVFP4Config
from tiny_models import build

CONFIG = kbit.KbitConfig(bits=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model's in 16 bits and, quantized, in k bits."""
    both = [tmp_path_factory.mktemp(name) for name in ("plain", "quantized")]
    build("qwen3_moe", torch.float32, False).save_pretrained(both[0])
    load = AutoModelForCausalLM.from_pretrained
    load(both[0], quantization_config=CONFIG).save_pretrained(both[1])
    return both


def inference_tensors(model):
    return [name for name, one in [*model.named_parameters(), *model.named_buffers()] if one.is_inference()]


def on_load(folders):
    return AutoModelForCausalLM.from_pretrained(folders[0], quantization_config=CONFIG)


def as_folder(folders):
    return AutoModelForCausalLM.from_pretrained(folders[1])


def decoded(folders):
    with torch.inference_mode(False):
        model = as_folder(folders)
    return kbit.dequantize_model(model)


def decoded_by_transformers(folders):
    with torch.inference_mode(False):
        model = as_folder(folders)
    return model.dequantize()


@pytest.mark.parametrize("make", [on_load, as_folder, decoded, decoded_by_transformers])
def test_models_are_as_outside(make, folders):
    with torch.inference_mode():
        model = make(folders)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert not inference_tensors(model)
    outside = make(folders)
    wanted = {name: one.requires_grad for name, one in outside.named_parameters()}
    assert {name: one.requires_grad for name, one in model.named_parameters()} == wanted
    assert all(one.grad_fn is None for one in model.state_dict(keep_vars=True).values())
    x = torch.randn(1, 5, 48, requires_grad=True)
    model(inputs_embeds=x).logits.sum().backward()
    assert x.grad.any()
    model.load_state_dict(outside.state_dict())


def test_models_in_nvfp4_are_as_outside(folders):
    with torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(folders[0], quantization_config=NVFP4Config())
    assert not inference_tensors(model)


def test_loads_that_are_not_of_kbit_stay_as_they_are(folders):
    with torch.inference_mode():
        assert inference_tensors(AutoModel.from_pretrained(folders[0]))  # of rotary embeddings


def test_a_load_that_fails_leaves_the_mode_as_it_was(tmp_path):
    model = build("llama", torch.float32, False)
    nn.init.constant_(model.model.layers[0].mlp.up_proj.weight, float("nan"))
    model.save_pretrained(tmp_path)
    with torch.inference_mode():
        with pytest.raises(kbit.NonFiniteWeightError):
            AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=CONFIG)
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("inside", [True, False], ids=["of that mode", "of another"])
@pytest.mark.parametrize(
    "codebook", ["nf", kbit.normal_float(4).tolist(), kbit.normal_float(4)], ids=["name", "numbers", "tensor"]
)
def test_weights_are_as_outside(inside, codebook):
    with torch.inference_mode(inside):
        w = torch.randn(8, 64)
    with torch.inference_mode():
        q = kbit.quantize(w, codebook=codebook)
        assert torch.is_inference_mode_enabled()
    assert not any(part.is_inference() for part in (q.packed, q.absmax, q.codebook, q.scale))
    assert torch.equal(q.packed, kbit.quantize(w.clone(), codebook=codebook).packed)
    x = torch.randn(2, 64, requires_grad=True)
    kbit.linear(x, q).sum().backward()
    assert x.grad.any()


@pytest.mark.parametrize("outside", [True, False])
def test_what_is_of_that_mode_beside_codes_changes_its_dtype(outside):
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
        kbit.quantize_model(model, kbit.QuantizationPolicy())
    with torch.inference_mode(not outside):
        kbit.dequantize_model(model, torch.bfloat16)
    with torch.inference_mode():
        assert model(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
