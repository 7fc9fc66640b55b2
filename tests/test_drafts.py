"""Drafts of `generate` with a tokenizer of their own: their heads are cut to the words that both know."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast
from transformers.generation.candidate_generator import _PruneReindexingLMHead

import kbit
from kbit.integrations.transformers.drafts import guard_drafts
from kbit.nn import KbitLinear
from kbit.nn.rows import with_rows
from kbit.nvfp4.layers import NVFP4Linear, NVFP4Settings
from tiny_models import build

ROWS = torch.tensor([7, 0, 39, 7])


def head_of(scale=1.0, bias=True):
    linear = nn.Linear(40, 48, bias=bias)
    with torch.no_grad():
        linear.weight.mul_(scale)
    return KbitLinear.from_linear(linear, bits=5, name="lm_head")


@pytest.mark.parametrize("scale", [1.0, 1e-6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_rows_are_those_of_the_weight(scale, bias, tiled):
    head = head_of(scale, bias).eval()
    if tiled:
        head.prepare(force=True)
    made = _PruneReindexingLMHead(head, ROWS).pruned_lm_head
    assert type(made) is KbitLinear
    assert ("weight_tiled" in head._parameters) == tiled
    assert (made.out_features, made.in_features, made.training) == (4, 40, False)
    assert torch.equal(made.dequantize(), head.dequantize()[ROWS])
    x = torch.randn(3, 40)
    torch.testing.assert_close(made(x), head(x)[:, ROWS])


def test_rows_become_tiles_where_they_pay(tiles_pay):
    head = head_of()
    with torch.inference_mode():
        made = with_rows(head, ROWS)
    assert "weight_tiled" in made._parameters
    assert not any(part.is_inference() for part in made.parameters())
    assert torch.equal(made.dequantize(), head.dequantize()[ROWS])


def test_rows_have_nothing_in_common_with_the_layer_that_they_are_of():
    head, other = head_of(1e-6), head_of(1e-3)
    made = with_rows(head, ROWS)
    wanted = made.dequantize()
    head.load_state_dict(other.state_dict())
    assert torch.equal(made.dequantize(), wanted)
    assert made.bias is not head.bias
    with pytest.raises(IndexError, match="out of range"):
        with_rows(head, torch.tensor([48]))


def test_other_heads():
    plain = nn.Linear(40, 48)
    made = _PruneReindexingLMHead(plain, ROWS).pruned_lm_head
    assert torch.equal(made.weight, plain.weight[ROWS])
    wrapped = nn.Module()
    wrapped.base_layer = head_of()
    settings = NVFP4Settings()
    for head, name in ((wrapped, "Module"), (NVFP4Linear.from_linear(plain, settings), "NVFP4Linear")):
        with pytest.raises(ValueError, match=rf"is a {name} of quantized weights.*Take adapters off"):
            _PruneReindexingLMHead(head, ROWS)


def test_transformers_without_that_class_is_left_alone():
    guard_drafts(nn)


def tokenizer_of(shift):
    """Words of ids 3 to 71, of which two such have some in common."""
    words = {f"w{(i * shift) % 69 + 3 + 10 * (shift > 1)}": i for i in range(3, 72)}
    special = {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(WordLevel(words | special, unk_token="w50"))
    made.pre_tokenizer = Whitespace()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


@pytest.mark.parametrize("bits", [None, 4], ids=["head in 16 bits", "head quantized"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"], ids=["tied", "untied"])
def test_generate_with_a_draft_of_another_tokenizer(architecture, bits):
    target = build(architecture, torch.float32)
    draft = type(target)(type(target.config)(**(target.config.to_dict() | {"vocab_size": 80}))).eval()
    kbit.quantize_model(draft, kbit.KbitConfig(embedding_bits=bits, search=False))
    head = draft.lm_head
    ids = torch.tensor([[5, 6, 7, 8]])
    both = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "eos_token_id": None}
    out = target.generate(
        ids,
        **both,
        assistant_model=draft,
        tokenizer=tokenizer_of(1),
        assistant_tokenizer=tokenizer_of(5),
        do_sample=True,
    )
    assert out.shape == (1, 16)
    assert torch.equal(out[:, :4], ids)
    kept = draft.get_input_embeddings().assistant_overlap_token_ids
    pruned = draft.get_output_embeddings().pruned_lm_head
    assert 0 < pruned.out_features == len(kept) < 72
    weight, rows = (head.weight, pruned.weight) if bits is None else (head.dequantize(), pruned.dequantize())
    assert torch.equal(rows, weight[kept])
