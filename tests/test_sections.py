"""Folders of codes whose `quantization_config` does not say so, or is none: refused, not drawn at random."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, LlamaModel

import kbit
from kbit.format import QuantizationPolicy
from kbit.integrations.nvfp4.config import NVFP4Config
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3]])
LOADS = (AutoModelForCausalLM, LlamaForCausalLM, LlamaModel)


@pytest.fixture
def folder(tmp_path):
    model = kbit.quantize_model(build("llama", torch.float32), kbit.KbitConfig(embedding_bits=5))
    model.save_pretrained(tmp_path)
    return tmp_path


def stating(section, folder):
    """A folder of which the config states another section."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": section}))
    return folder


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("section", [True, 5, "x", [1], {"quant_method": []}, {"quant_method": {}}], ids=str)
def test_a_section_that_is_none_is_refused(section, load, folder):
    with pytest.raises(ValueError, match="quantization_config must be an object") as refused:
        load.from_pretrained(stating(section, folder))
    told = str(refused.value)
    assert told.startswith(f"{folder / 'config.json'}: ")
    assert f"got {section!r}. Fetch config.json again" in told
    with pytest.raises(ValueError, match="must be an object"):
        AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("config", [kbit.KbitConfig, QuantizationPolicy, NVFP4Config])
@pytest.mark.parametrize("section", [None, 5, "x", [1]], ids=str)
def test_a_section_that_is_none_is_no_config(section, config):
    got = type(section).__name__
    with pytest.raises(TypeError, match=f"^quantization_config must be an object, got {got}\\.$"):
        config.from_dict(section)


@pytest.mark.parametrize("section", [{"bits": 4}, {"quant_method": None}], ids=str)
def test_a_section_without_a_method_is_left_to_transformers(section, folder):
    assert AutoConfig.from_pretrained(stating(section, folder)).quantization_config == section
    with pytest.raises(ValueError, match="quant_method"):
        LlamaForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("section", "stated"),
    [
        (None, "no quantization_config of kbit"),
        ({"quant_method": "x", "bits": 4}, "quant_method 'x'"),
        ({"quant_method": 5}, "quant_method 5"),
    ],
)
def test_codes_of_another_method_are_refused(section, stated, load, folder):
    with pytest.raises(ValueError, match="would be drawn at random") as refused:
        load.from_pretrained(stating(section, folder))
    told = str(refused.value)
    assert told.startswith(f"{folder} holds weights that kbit has quantized, but its config has {stated}, ")
    assert ".weight_packed, " in told


def test_codes_are_not_quantized(folder):
    config = kbit.KbitConfig(bits=4)
    with pytest.raises(ValueError, match=r"has no quantization_config of kbit, .*weight_packed"):
        AutoModelForCausalLM.from_pretrained(stating(None, folder), quantization_config=config)
    settings = {"config": AutoConfig.from_pretrained(folder), "quantization_config": config}
    tensors = load_file(folder / "model.safetensors")
    with pytest.raises(ValueError, match="holds weights that kbit has quantized, but its config has no"):
        LlamaForCausalLM.from_pretrained(None, state_dict=tensors, **settings)


def test_what_a_class_of_models_lacks_is_left_in_the_files(tmp_path):
    """Its head has codes, too, and nothing is amiss."""
    model = kbit.quantize_model(build("qwen3", torch.float32), kbit.KbitConfig(embedding_bits=5))
    model.save_pretrained(tmp_path)
    inner = type(model.model).from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(inner(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_other_models_load_as_they_did(tmp_path):
    model = build("llama", torch.float32)
    model.save_pretrained(tmp_path)
    for section in (None, {"quant_method": "x"}):
        again = AutoModelForCausalLM.from_pretrained(stating(section, tmp_path))
        with torch.no_grad():
            assert torch.equal(again(IDS).logits, model(IDS).logits)
