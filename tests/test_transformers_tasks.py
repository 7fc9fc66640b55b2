"""transformers' classes for other tasks than a model was quantized for, and what only some models tie."""

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

import kbit
from kbit.integrations.transformers.saving import copy_converter
from kbit.nn import KbitLinear
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7]])
BERT = {"vocab_size": 72, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT |= {"intermediate_size": 72, "max_position_embeddings": 32}


@pytest.fixture
def masked(tmp_path):
    """A BERT for masked words, quantized in place, and its folder. It has no pooler."""
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(transformers.BertConfig(**BERT)).eval()
    kbit.quantize_model(model, kbit.KbitConfig(bits=4)).save_pretrained(tmp_path / "masked")
    return model, tmp_path / "masked"


def test_a_head_with_a_tied_bias_is_saved(masked):
    model, folder = masked
    assert isinstance(model.cls.predictions.decoder, nn.Linear)
    again = transformers.BertForMaskedLM.from_pretrained(folder)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert again.cls.predictions.decoder.bias is again.cls.predictions.bias
    assert not [name for name in load_file(folder / "model.safetensors") if "bias_" in name]


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification"])
def test_what_the_quantized_class_had_not_is_drawn_at_random(kind, masked):
    model, folder = masked
    other = getattr(transformers, kind).from_pretrained(folder).eval()
    base = other.base_model
    assert type(base.pooler.dense) is nn.Linear
    assert type(base.encoder.layer[0].attention.self.query) is KbitLinear
    states = [each(IDS).last_hidden_state for each in (base, model.bert)]
    assert torch.equal(*states)


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification", "BertForMaskedLM"])
def test_what_it_had_must_be_there(kind, masked):
    _, folder = masked
    tensors = load_file(folder / "model.safetensors")
    for part in ("packed", "absmax"):
        del tensors[f"bert.encoder.layer.1.output.dense.weight_{part}"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"holds no tensors.*encoder\.layer\.1\.output\.dense\.weight\. Its"):
        getattr(transformers, kind).from_pretrained(folder)


def test_a_saved_model_is_dequantized(tmp_path):
    """Saving writes the dtype's name into the config, which `dequantize` reads."""
    model = kbit.quantize_model(build("llama", torch.float32), kbit.KbitConfig())
    model.save_pretrained(tmp_path / "saved")
    assert model.dequantize().model.layers[0].self_attn.q_proj.weight.dtype == torch.float32


def test_a_copied_converter_leaves_the_other_its_patterns():
    """Undone on saving, `experts.down_proj` would be found in shared_experts.down_proj, too."""
    operations = [MergeModulelist(dim=0), Concatenate(dim=1)]
    entry = WeightConverter([r"\.experts.*.w2.weight"], [r"\.experts.down_proj"], operations=operations)
    patterns = entry._original_source_patterns, entry._original_target_patterns
    wanted = [[*each] for each in patterns]
    copy_converter(entry, *patterns, operations)
    assert [*patterns] == wanted
