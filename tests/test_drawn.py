"""Layers of a class that the weights hold nothing of: transformers draws them, so they stay unquantized.

Of pickled weights and of a state dict that is known only once they are loaded.
"""

from __future__ import annotations

import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import kbit
from kbit.nn import KbitLinear
from kbit.nn.parts import QuantizedModule
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7]])
CONFIG = kbit.KbitConfig(bits=4, embedding_bits=5)
PICKLED = ("pickled", "state dict")


def load(way, kind, config, tensors, folder, **settings):
    """(The model on load, the keys that transformers tells to be missing)."""
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    settings = {"quantization_config": CONFIG, "output_loading_info": True} | settings
    torch.manual_seed(0)
    if way == "state dict":
        model, info = kind.from_pretrained(None, config=config, state_dict=dict(tensors), **settings)
    else:
        if way == "pickled":
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        model, info = kind.from_pretrained(folder, **settings)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert "mark_tied_weights_as_initialized" not in vars(model)
    return model, set(info["missing_keys"])


def assert_alike(one, other):
    for (name, module), (its, like) in zip(one.named_modules(), other.named_modules(), strict=True):
        assert (name, type(module)) == (its, type(like))
    states = [each.state_dict() for each in (one, other)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype
        assert torch.equal(tensor, states[1][name]), name


@pytest.fixture(scope="module")
def causal():
    model = build("llama", torch.float32)
    return model.config, {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", PICKLED)
def test_a_head_is_drawn_as_from_safetensors(way, dtype, causal, tmp_path):
    kind, config = transformers.LlamaForSequenceClassification, causal[0]
    tensors = {name: tensor.to(dtype) for name, tensor in causal[1].items()}
    model, missing = load(way, kind, config, tensors, tmp_path / "it", dtype=dtype)
    wanted, told = load("safetensors", kind, config, tensors, tmp_path / "wanted", dtype=dtype)
    assert missing == told == {"score.weight"}
    assert type(model.score) is nn.Linear
    assert 0 < model.score.weight.float().std() < 0.1
    assert isinstance(model.model.layers[1].mlp.up_proj, KbitLinear)
    assert_alike(model, wanted)
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    model.score.weight.sum().backward()
    model.save_pretrained(tmp_path / "saved")
    assert_alike(kind.from_pretrained(tmp_path / "saved", dtype=dtype), model)


@pytest.mark.parametrize("lacking", [["weight"], ["weight", "bias"]], ids=str)
@pytest.mark.parametrize("way", PICKLED)
def test_a_bias_that_is_there_is_loaded(way, lacking, tmp_path):
    sizes = {"vocab_size": 72, "hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind = transformers.BertModel
    source = kind(transformers.BertConfig(**sizes, intermediate_size=72))
    nn.init.normal_(source.pooler.dense.bias)
    names = {f"pooler.dense.{name}" for name in lacking}
    tensors = {name: tensor for name, tensor in source.state_dict().items() if name not in names}
    model, missing = load(way, kind, source.config, tensors, tmp_path / "it")
    wanted, told = load("safetensors", kind, source.config, tensors, tmp_path / "wanted")
    assert missing == told == names
    dense = model.pooler.dense
    assert type(dense) is nn.Linear
    assert torch.equal(dense.bias, source.pooler.dense.bias) is ("bias" not in lacking)
    assert_alike(model, wanted)


@pytest.mark.parametrize("way", PICKLED)
def test_a_head_of_another_size(way, causal, tmp_path):
    config, tensors = causal
    tensors = tensors | {"score.weight": torch.randn(5, config.hidden_size)}
    settings = {"ignore_mismatched_sizes": True}
    kind = transformers.LlamaForSequenceClassification
    with pytest.raises(ValueError, match=r"score\.weight in another shape.*_to_not_convert=\['score'\]"):
        load(way, kind, config, tensors, tmp_path / "it", **settings)
    settings["quantization_config"] = kbit.KbitConfig(bits=4, modules_to_not_convert=["score"])
    model, _ = load(way, kind, config, tensors, tmp_path / "it", **settings)
    assert type(model.score) is nn.Linear


@pytest.mark.parametrize("way", PICKLED)
def test_weights_of_another_model(way, causal, tmp_path):
    """Their names have a prefix that this class does not know: all is drawn."""
    config, tensors = causal
    tensors = {f"other.{name}": tensor for name, tensor in tensors.items()}
    kind = transformers.LlamaForSequenceClassification
    model, missing = load(way, kind, config, tensors, tmp_path / "it")
    wanted, told = load("safetensors", kind, config, tensors, tmp_path / "wanted")
    assert missing == told == set(wanted.state_dict())
    assert not any(isinstance(module, QuantizedModule) for module in model.modules())
    assert_alike(model, wanted)


def without(pattern):
    """A mixture of experts, and its tensors but some."""
    model = build("qwen3_moe", torch.float32)
    tensors = {name: t for name, t in model.state_dict().items() if not re.search(pattern, name)}
    return model, tensors


@pytest.mark.parametrize("way", PICKLED)
def test_experts_are_drawn(way, tmp_path):
    source, tensors = without(r"layers\.0\.mlp\.experts")
    model, missing = load(way, type(source), source.config, tensors, tmp_path / "it")
    assert missing == {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")}
    experts = model.model.layers[0].mlp.experts
    assert type(experts) is type(source.model.layers[0].mlp.experts)
    assert 0 < experts.gate_up_proj.std() < 0.1
    assert 0 < experts.down_proj.std() < 0.1
    assert isinstance(model.lm_head, KbitLinear)
    assert model(IDS).logits.isfinite().all()


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("way", PICKLED)
def test_experts_that_are_there_in_part_are_refused(way, name, tmp_path):
    source, tensors = without(rf"layers\.0\.mlp\.experts\.{name}")
    path = "model.layers.0.mlp.experts"
    message = rf"hold no tensor {path}\.{name}\. .*modules_to_not_convert=\['{path}'\]"
    with pytest.raises(ValueError, match=message):
        load(way, type(source), source.config, tensors, tmp_path / "it")
    config = kbit.KbitConfig(bits=4, modules_to_not_convert=[path])
    model, _ = load(way, type(source), source.config, tensors, tmp_path / "it", quantization_config=config)
    assert type(model.get_submodule(path)) is type(source.get_submodule(path))


def test_a_module_under_two_names_is_put_back_under_both(causal, tmp_path, monkeypatch):
    kind = transformers.LlamaForSequenceClassification
    original = kind.__init__

    def shared(self, config):
        original(self, config)
        self.again = self.score

    monkeypatch.setattr(kind, "__init__", shared)
    model, _ = load("state dict", kind, *causal, tmp_path)
    assert type(model.score) is nn.Linear
    assert model.again is model.score


class Split(torch.Tensor):
    """As a DTensor, which is one rank's part of a parameter."""


@pytest.mark.parametrize("name", ["weight", "weight_packed", "bias"])
def test_a_layer_that_was_split_is_not_put_back(name):
    linear = nn.Linear(64, 32, device="meta")
    layer = KbitLinear.empty_like(linear, 4, "e4m4", "head", device="meta")
    layer._parameters["weight"] = linear.weight
    layer._parameters[name] = nn.Parameter(layer._parameters[name].as_subclass(Split), requires_grad=False)
    assert type(layer._parameters[name]) is Split
    with pytest.raises(
        ValueError, match=r"hold no tensor head\.weight\. Leave the layer unquantized, with mod"
    ):
        layer.give_back(linear)


def test_the_quantized_checkpoint_of_a_class_without_the_layer(causal, tmp_path):
    """Has nothing to put back: files in safetensors say what they hold."""
    config, tensors = causal
    load("pickled", transformers.LlamaForCausalLM, config, tensors, tmp_path / "it")[0].save_pretrained(
        tmp_path / "saved"
    )
    assert "lm_head.weight_packed" not in load_file(tmp_path / "saved" / "model.safetensors")
    shutil.rmtree(tmp_path / "it")
    model = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert type(model.score) is nn.Linear
