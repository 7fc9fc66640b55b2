"""`tie_weights` of transformers, by what the two layers are that it ties: any may have been replaced."""

from __future__ import annotations

import copy
import warnings

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import kbit
from kbit.nn import KbitEmbedding, KbitLinear, QuantizedModule, tied
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3]])
POLICY = kbit.KbitConfig(bits=4, embedding_bits=5, search=False)
PLAIN = {"lm_head.weight": "model.embed_tokens.weight"}


def parts(*suffixes):
    return {name + part: source + part for name, source in PLAIN.items() for part in suffixes}


CODES = parts("_packed", "_absmax")
WITH_FACTOR = parts("_packed", "_absmax", "_scale")


def new_table(bits=None, scale=1.0, rows=72, columns=40):
    table = nn.Embedding(rows, columns)
    with torch.no_grad():
        table.weight.mul_(scale)
    return table if bits is None else KbitEmbedding.from_embedding(table, bits=bits)


def with_table(**settings):
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    model.set_input_embeddings(new_table(**settings))
    return model


def part_quantized():
    model = build("llama", torch.float32)
    kbit.quantize_model(model.model, POLICY)
    return model


def part_dequantized():
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    kbit.dequantize_model(model.model)
    return model


def head_replaced():
    """By hand, of a width of its own."""
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    model.lm_head = KbitLinear.from_linear(nn.Linear(40, 72, bias=False), bits=3)
    return model


def as_weight(layer):
    return layer.dequantize() if isinstance(layer, QuantizedModule) else layer.weight


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def assert_tied(model, names):
    """The head multiplies by the very weight that the table looks up, and transformers knows its names."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    held = ("weight_packed", "weight_absmax") if isinstance(table, QuantizedModule) else ("weight",)
    assert all(getattr(head, name) is getattr(table, name) for name in held)
    assert torch.equal(as_weight(head), as_weight(table))
    with torch.no_grad():
        hidden = model.model(IDS).last_hidden_state
        wanted = F.linear(hidden, as_weight(table))
    torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert model.all_tied_weights_keys == names


def assert_reloads(model, folder):
    model.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = AutoModelForCausalLM.from_pretrained(folder)
        again.tie_weights()
    assert torch.equal(logits(again), logits(model))
    assert again.all_tied_weights_keys == model.all_tied_weights_keys
    assert model.config.tie_word_embeddings


def test_tying_again_changes_nothing(tiles_pay):
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    wanted, names = logits(model), model.all_tied_weights_keys
    head, tiles = model.lm_head, tied.tiles_beside(model.lm_head)
    held = {name: id(part) for name, part in head._parameters.items()}
    for recompute in (True, False):
        model.tie_weights(recompute_mapping=recompute)
        assert model.lm_head is head
        assert {name: id(part) for name, part in head._parameters.items()} == held
        assert tied.tiles_beside(head) is tiles
        assert model.all_tied_weights_keys == names == CODES
    assert torch.equal(logits(model), wanted)


@pytest.mark.parametrize("old", [1.0, 1e-6])
@pytest.mark.parametrize("new", [1.0, 1e-6])
def test_a_new_table_of_the_same_width_gives_its_factor_too(old, new, tmp_path):
    model = build("llama", torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(old)
    model, head = kbit.quantize_model(model, POLICY), model.lm_head
    model.set_input_embeddings(new_table(5, new))
    head = model.lm_head
    model.tie_weights()
    assert model.lm_head is head
    assert head.tied_to == (model.get_input_embeddings(),)
    assert_tied(model, CODES if new == 1 else WITH_FACTOR)
    assert_reloads(model, tmp_path)


@pytest.mark.parametrize(
    ("make", "was", "becomes", "names"),
    [
        (lambda: with_table(bits=3), "5 bits", "3 bits", CODES),
        (lambda: with_table(bits=3, scale=1e-6), "5 bits", "3 bits", WITH_FACTOR),
        (with_table, "5 bits", "unquantized", PLAIN),
        (part_quantized, "unquantized", "5 bits", CODES),
        (part_dequantized, "5 bits", "unquantized", PLAIN),
        (head_replaced, "3 bits", "5 bits", CODES),
    ],
    ids=["narrower", "with a factor", "16 bits", "part quantized", "part dequantized", "other head"],
)
def test_a_head_gets_what_the_table_is_by_then(make, was, becomes, names, tmp_path):
    model, seen = make(), []
    handle = model.lm_head.register_forward_hook(lambda *call: seen.append(call[0]))
    told = rf"replaced lm_head \({was}\) by a layer with the weight of model.embed_tokens \({becomes}\)"
    with pytest.warns(UserWarning, match=told) as caught:
        model.tie_weights()
    assert [one.filename for one in caught] == [__file__]
    assert_tied(model, names)
    assert {*seen} == {model.lm_head}
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.tie_weights()
    assert_reloads(model, tmp_path)


def test_two_layers_that_nobody_quantized_are_transformers_own():
    model = with_table()
    model.lm_head = nn.Linear(40, 72, bias=False)
    model.tie_weights()
    assert_tied(model, PLAIN)
    assert model._tied_weights_keys == PLAIN


def test_a_table_with_more_rows_gives_the_bias_zeros():
    model = build("llama", torch.float32)
    weight = model.model.embed_tokens.weight
    model.lm_head = nn.Linear(40, 72)
    model.lm_head.weight = weight
    model = kbit.quantize_model(model, POLICY)
    bias = model.lm_head.bias.detach().clone()
    for bits in (5, None):
        model.set_input_embeddings(new_table(bits, rows=80))
        with pytest.warns(UserWarning, match="replaced lm_head"):
            model.tie_weights()
        assert torch.equal(model.lm_head.bias, F.pad(bias, (0, 8)))
        assert logits(model).shape == (1, 4, 80)


def test_a_tie_that_the_config_gets_later(tmp_path):
    model = build("qwen3", torch.float32)
    assert not model.config.tie_word_embeddings
    model = kbit.quantize_model(model, POLICY)
    model.tie_weights()
    assert model.lm_head.weight_packed is not model.model.embed_tokens.weight_packed
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert_tied(model, CODES)
    assert_reloads(model, tmp_path)


BERT = {"vocab_size": 72, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}


@pytest.mark.parametrize("convert", ["quantize", "dequantize"])
def test_names_by_patterns_and_biases(convert):
    """BERT's are patterns for transformers, which match parts of weights as well; its bias is tied, too."""
    model = BertForMaskedLM(BertConfig(**BERT, num_hidden_layers=1)).eval()
    with torch.no_grad():
        model.cls.predictions.bias.normal_()
    names = dict(model.all_tied_weights_keys)
    if convert == "quantize":
        kbit.quantize_model(model.bert, POLICY)
    else:
        kbit.dequantize_model(kbit.quantize_model(model, POLICY).bert)
    with pytest.warns(UserWarning, match="replaced cls.predictions.decoder"):
        model.tie_weights()
    head = model.get_output_embeddings()
    assert isinstance(head, KbitLinear) == (convert == "quantize")
    assert torch.equal(as_weight(head), as_weight(model.get_input_embeddings()))
    assert head.bias is model.cls.predictions.bias
    if convert == "dequantize":
        assert model.all_tied_weights_keys == names


def test_a_table_that_four_have():
    """T5's is that of its encoder, its decoder and its head."""
    sizes = {"vocab_size": 72, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    model = kbit.quantize_model(T5ForConditionalGeneration(T5Config(**sizes)).eval(), POLICY)
    ids = {"input_ids": IDS, "decoder_input_ids": IDS}
    wanted, names = model(**ids).logits, model.all_tied_weights_keys
    kbit.dequantize_model(model.encoder)
    with pytest.warns(UserWarning, match=r"replaced encoder.embed_tokens \(unq.* of shared \(5 bits\)"):
        model.tie_weights()
    torch.testing.assert_close(model(**ids).logits, wanted)
    assert model.encoder.embed_tokens.weight_packed is model.shared.weight_packed
    assert model.all_tied_weights_keys == names


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]], ids=str)
def test_adapters_around_tied_layers_stay(targets):
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, init_lora_weights=False))
    wanted, held = logits(adapted), {*dict(adapted.named_parameters(remove_duplicate=False))}
    adapted.tie_weights()
    assert torch.equal(logits(adapted), wanted)
    assert {*dict(adapted.named_parameters(remove_duplicate=False))} == held


class OtherHead(nn.Linear):
    pass


def other_class():
    model = part_quantized()
    model.lm_head = OtherHead(40, 72, bias=False)
    return model


def adapted_head():
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))
    model.set_input_embeddings(new_table(3))
    return model


def read_by_others():
    sizes = {"vocab_size": 72, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    model = MambaForCausalLM(MambaConfig(**sizes))
    kbit.quantize_model(model.backbone, POLICY)
    return model


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (other_class, r"lm_head \(unquantized\) cannot get .*of model.embed_tokens \(5 bits\).*OtherHead is"),
        (adapted_head, r"lm_head \(5 bits\) cannot get .*of model.embed_tokens \(3 bits\).*an adapter"),
        (read_by_others, r"lm_head \(unquantized\) cannot get .*of backbone.embeddings.*reads its weight"),
    ],
    ids=["class", "adapter", "reader"],
)
def test_what_cannot_be_tied_is_refused_and_stays(make, told):
    model = make()
    wanted, names = logits(model), copy.deepcopy(model.all_tied_weights_keys)
    with pytest.raises(ValueError, match=told):
        model.tie_weights()
    assert torch.equal(logits(model), wanted)
    assert model.all_tied_weights_keys == names
    model.config.tie_word_embeddings = False
    model.tie_weights()
    assert torch.equal(logits(model), wanted)


def test_a_refused_tie_of_several_leaves_all_as_they_were():
    sizes = {"vocab_size": 72, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes))
    model.lm_head = OtherHead(64, 72, bias=False)
    model.shared = new_table(5, columns=64)
    before = {name: id(module) for name, module in model.named_modules()}
    with pytest.raises(ValueError, match=r"lm_head \(unquantized\) cannot get"):
        model.tie_weights()
    assert {name: id(module) for name, module in model.named_modules()} == before
    model.lm_head = nn.Linear(64, 72, bias=False)
    with pytest.warns(UserWarning, match="replaced") as caught:
        model.tie_weights()
    assert len(caught) == 3
    assert model.encoder.embed_tokens.dtype_probe.device == model.shared.dtype_probe.device
    ids = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert model.eval()(**ids).logits.isfinite().all()


def test_lists_of_old_models_are_no_ties():
    model = kbit.quantize_model(build("qwen3", torch.float32), POLICY)
    wanted = logits(model)
    model._tied_weights_keys = ["lm_head.weight"]
    model.tie_weights()
    assert torch.equal(logits(model), wanted)


def test_on_the_meta_device_ties_come_back():
    """As FSDP has it, which moves models there."""
    model = kbit.quantize_model(build("llama", torch.float32), POLICY).to("meta")
    assert model.lm_head.weight_packed is not model.model.embed_tokens.weight_packed
    model.tie_weights()
    assert model.lm_head.weight_packed is model.model.embed_tokens.weight_packed
    assert isinstance(model.lm_head.weight_packed, nn.Parameter)


def test_a_head_that_is_gone_is_told_by_transformers():
    model = kbit.quantize_model(build("llama", torch.float32), POLICY)
    del model.lm_head
    with pytest.raises(AttributeError, match="lm_head"):
        model.tie_weights()
    kbit.dequantize_model(model)
    assert model.all_tied_weights_keys == PLAIN


def test_transformers_calls_it():
    assert PreTrainedModel.tie_weights.knows_kbit
