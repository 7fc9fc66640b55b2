"""The mask of causal attention in one kernel: the op, and where steps use it for transformers' own."""

from __future__ import annotations

import contextlib

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import StaticCache, masking_utils

from kbit.integrations.transformers import additive_masks
from kbit.integrations.transformers.cache_argument import with_cache
from static_steps import heads_alone
from tiny_models import build

op = torch.ops.kbit.causal_mask
gpu = pytest.mark.gpu
HALVES = (torch.float16, torch.bfloat16)


def defined(first, there, batch, tokens, keys, dtype):
    """One key after the other."""
    mask = torch.full((batch, 1, tokens, keys), -torch.inf, dtype=dtype)
    for row in range(batch):
        for token in range(tokens):
            for key in range(min(keys, first + token + 1)):
                if there is None or (key < there.shape[1] and there[row, key]):
                    mask[row, 0, token, key] = 0
    return mask


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 12),
    st.integers(0, 14),
    st.none() | st.integers(0, 14),
    st.sampled_from([torch.float32, *HALVES]),
)
def test_the_definition(batch, tokens, keys, first, known, dtype):
    there = None if known is None else torch.rand(batch, known) < 0.7
    for at in (torch.tensor(first), torch.tensor([first])):
        mask = op(at, there, batch, tokens, keys, dtype)
        assert mask.dtype == dtype
        assert torch.equal(mask, defined(first, there, batch, tokens, keys, dtype))


ARGUMENTS = {
    "first": torch.tensor(3),
    "there": torch.tensor([[True, False, True]] * 2),
    "batch": 2,
    "tokens": 1,
    "keys": 8,
    "dtype": torch.bfloat16,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": torch.tensor(3.0)}, "first must be one int64, got 1 of torch.float32"),
        ({"first": torch.tensor([1, 2])}, "first must be one int64, got 2"),
        ({"there": torch.ones(2, 3)}, r"there must be torch.bool, got torch.float32. Pass there.bool\(\)"),
        ({"there": torch.ones(3, 3).bool()}, r"there must be \[2, any\], got \(3, 3\)"),
        ({"there": torch.ones(3).bool()}, r"there must be \[2, any\], got \(3,\)"),
        ({"there": ARGUMENTS["there"].to("meta")}, "there is on meta, first on cpu"),
        ({"keys": -1}, r"0 or more, got \(2, 1, -1\)"),
        ({"dtype": torch.int32}, "dtype must be float32, float16 or bfloat16, got torch.int32"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        op(*(ARGUMENTS | change).values())


def test_opcheck():
    for there in (None, ARGUMENTS["there"]):
        torch.library.opcheck(op.default, tuple((ARGUMENTS | {"there": there}).values()))


# -- masks of models -----------------------------------------------------------------------------------------


def asked(**more):
    """What transformers asks for in a step of a cache of a fixed size."""
    return {
        "batch_size": 2,
        "q_length": 1,
        "kv_length": 8,
        "q_offset": torch.tensor([3]),
        "kv_offset": 0,
        "mask_function": masking_utils.causal_mask_function,
        "attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]).bool(),
        "allow_is_causal_skip": False,
        "dtype": torch.bfloat16,
        "config": None,
        "use_vmap": False,
        "device": torch.device("cpu"),
    } | more


@pytest.fixture
def calls(monkeypatch):
    made = []
    monkeypatch.setattr(torch.ops.kbit, "causal_mask", lambda *given: made.append(given) or op(*given))
    assert additive_masks._is_known(masking_utils.sdpa_mask)
    made.clear()
    return made


def own(**named):
    return additive_masks.additive(masking_utils.sdpa_mask(**named), named["dtype"])


@pytest.mark.parametrize("there", [asked()["attention_mask"], None], ids=["padded", "whole"])
def test_it_is_transformers_mask(there, calls):
    named = asked(attention_mask=there)
    assert torch.equal(additive_masks.additive_mask(**named), own(**named))
    assert len(calls) == 1


def reversed_mask(batch, head, query, key):
    return key >= query


@pytest.mark.parametrize(
    "change",
    [
        {"q_offset": 3},
        {"q_offset": torch.tensor(3, dtype=torch.int32)},
        {"kv_offset": 1},
        {"mask_function": masking_utils.sliding_window_causal_mask_function(2)},
        {"mask_function": reversed_mask},
        {"local_size": 2},
        {"use_vmap": True},
        {"allow_is_causal_skip": True},
        {"something": 1},
    ],
    ids=lambda change: "-".join(change),
)
def test_others_are_transformers_own(change, calls):
    named = asked(**change)
    have, want = additive_masks.additive_mask(**named), own(**named)
    assert torch.equal(have, want) if isinstance(want, torch.Tensor) else have is want
    assert not calls


@pytest.mark.parametrize("changed", [lambda **named: ~masking_utils.sdpa_mask(**named), lambda: None])
def test_a_release_that_computes_something_else(changed):
    assert not additive_masks._is_known(changed)


def test_dtypes_that_the_op_does_not_have(calls):
    named = asked(dtype=torch.float64)
    assert torch.equal(additive_masks.additive_mask(**named), own(**named))
    assert not calls


@torch.no_grad()
def decoded(model, around):
    """Logits of some steps behind a padded prompt, with a cache of a fixed size."""
    cache, mask = StaticCache(config=model.config, max_cache_len=16), torch.tensor([[1, 1, 1], [0, 1, 1]])
    ids, mask, logits = (2 + mask).to(model.device), mask.to(model.device), []
    for _ in range(4):
        with around(model):
            logits.append(model(ids, attention_mask=mask, **with_cache(cache)).logits[:, -1])
        ids, mask = logits[-1].argmax(-1, keepdim=True), torch.nn.functional.pad(mask, (0, 1), value=1)
    return torch.stack(logits)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite"])
def test_steps_use_it(architecture, calls):
    model = build(architecture, torch.float32)
    want = decoded(model, lambda model: contextlib.nullcontext())
    assert not calls
    torch.testing.assert_close(decoded(model, heads_alone), want)
    assert len(calls) == 3  # one a step, none of the prompt


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 4096), (3, 1, 333), (32, 1, 2048), (2, 5, 24), (2, 300, 520)], ids=str
)
def test_the_kernel_gives_the_definition(sizes, dtype):
    batch, tokens, keys = sizes
    for first in (0, 7, keys - tokens, keys - 1, 2 * keys, 2**40):
        for known in (None, 0, 5, keys, keys + 3):
            there = None if known is None else torch.rand(batch, known) < 0.9
            want = op(torch.tensor(first), there, *sizes, dtype)
            there = there if there is None else there.cuda()
            assert torch.equal(op(torch.tensor([first], device="cuda"), there, *sizes, dtype).cpu(), want)
