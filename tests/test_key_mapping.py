"""Files whose tensors have other names than a model's, which `from_pretrained(key_mapping=...)` says."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kbit
from kbit.integrations.transformers.key_mapping import key_mapping
from kbit.nn import KbitLinear
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])
MAPPING = {r"\.ffn\.": ".mlp.", r"^body\.": "model."}


def renamed(folder):
    """Have the files of a model call its parts otherwise."""
    path = folder / "model.safetensors"
    tensors = {
        name.replace(".mlp.", ".ffn.").replace("model.", "body.", 1): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def load(folder, **more):
    model = AutoModelForCausalLM.from_pretrained(folder, key_mapping=MAPPING, dtype=torch.float32, **more)
    assert key_mapping() is None
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_they_are_quantized_and_loaded_as_by_the_models_names(architecture, tmp_path):
    config = kbit.KbitConfig(bits=4, overrides={r"layers\.0\..*down_proj$": 3})
    build(architecture, torch.float32, spread=False).save_pretrained(tmp_path / "source")
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "source", quantization_config=config)
    own.save_pretrained(tmp_path / "quantized")
    renamed(tmp_path / "source")
    model = load(tmp_path / "source", quantization_config=config)
    assert {type(layer.mlp.up_proj) for layer in model.model.layers if hasattr(layer.mlp, "up_proj")} == {
        KbitLinear
    }
    assert torch.equal(logits(model), logits(own))
    renamed(tmp_path / "quantized")
    assert torch.equal(logits(load(tmp_path / "quantized")), logits(own))


def test_it_is_saved_by_the_names_of_its_files_as_any_model(tmp_path):
    build("llama", torch.float32, spread=False).save_pretrained(tmp_path / "source")
    renamed(tmp_path / "source")
    model = load(tmp_path / "source", quantization_config=kbit.KbitConfig(bits=4, overrides={"ffn": 3}))
    assert model.model.layers[0].mlp.up_proj.bits == 3
    model.save_pretrained(tmp_path / "saved")
    assert "body.layers.0.ffn.up_proj.weight_packed" in load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(logits(load(tmp_path / "saved")), logits(model))
