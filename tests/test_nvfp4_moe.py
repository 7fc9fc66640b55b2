"""Experts: sorting, the four ways to quantize for them with identical bytes, the product, the sum."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbit.nvfp4 import (
    NVFP4Tensor,
    dequantize_nvfp4,
    gemm_nvfp4,
    moe_align,
    moe_combine,
    moe_gemm_nvfp4,
    quantize_nvfp4,
)
from kbit.nvfp4.expert_products import expert_product
from kbit.nvfp4.moe import DEDUP, combine_sorted, quantize_for_experts, route

EXPERTS, CHOICES, COLUMNS, OUTPUTS = 8, 4, 80, 12
TOKENS = (1, 7, 8, 9, 32, 128, 129)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def routing_ids(kind: str, tokens: int, choices: int = CHOICES, experts: int = EXPERTS) -> torch.Tensor:
    draw = generator(tokens)
    if kind == "zipf":
        popularity = 1 / torch.arange(1, experts + 1).float().expand(tokens, -1)
        return torch.multinomial(popularity, choices, generator=draw).int()
    if kind == "duplicate":  # a token may choose an expert several times, and experts 1.. stay empty
        return torch.zeros(tokens, choices, dtype=torch.int32)
    ids = torch.randint(experts, (tokens, choices), generator=draw).int()
    if kind == "not mine":
        ids[torch.rand(ids.shape, generator=draw) < 0.4] = experts
    if kind == "empty":
        ids = ids // 2 * 2
    return ids


ROUTINGS = ("uniform", "zipf", "duplicate", "empty", "not mine")


@pytest.fixture(scope="module")
def weight() -> NVFP4Tensor:
    w = torch.randn(EXPERTS, OUTPUTS, COLUMNS, generator=generator(0))
    stack = [quantize_nvfp4(each, global_scale=0.1 + i) for i, each in enumerate(w)]
    return NVFP4Tensor.stack(stack)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32))
def test_align_sorts_stably(tokens: int, choices: int, experts: int, seed: int) -> None:
    ids = torch.randint(experts + 1, (tokens, choices), generator=generator(seed)).int()
    source, slots, bounds, inverse = moe_align(ids, experts)
    assert {t.dtype for t in (source, slots, bounds, inverse)} == {torch.int32}
    flat = ids.flatten().tolist()
    expected = sorted(range(len(flat)), key=lambda slot: flat[slot])  # Python's sort is stable
    assert slots.tolist() == expected
    assert source.tolist() == [slot // choices for slot in expected]
    assert bounds.tolist() == [sum(each < expert for each in flat) for expert in range(experts + 1)]
    assert inverse.shape == ids.shape
    assert [expected[row] for row in inverse.flatten().tolist()] == list(range(len(flat)))


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_way_gives_the_same_bytes(weight: NVFP4Tensor, tokens: int, kind: str) -> None:
    x = torch.randn(tokens, COLUMNS, generator=generator(tokens + 1)).bfloat16()
    ids = routing_ids(kind, tokens)
    routing = route(ids, EXPERTS)
    inputs = {way: quantize_for_experts(x, routing, way) for way in DEDUP}
    reference = inputs["off"].tensor
    assert (inputs["off"].quantized_rows, inputs["off"].copied_rows) == (tokens * CHOICES, 0)
    y = {}
    for way, each in inputs.items():
        assert way == "off" or each.quantized_rows == tokens
        rows = slice(None) if each.rows is None else each.rows
        assert torch.equal(each.tensor.codes[rows], reference.codes)
        assert torch.equal(each.tensor.scales[rows], reference.scales)
        for accum in ("exact", "seq16"):
            y[way, accum] = expert_product(each, routing, weight, accum)
            assert torch.equal(y[way, accum], y["off", accum])
    assert torch.equal(moe_gemm_nvfp4(x, weight, ids, "gather"), y["off", "exact"][routing.inverse])


@pytest.mark.parametrize("way", DEDUP)
def test_the_default_device_may_be_another(weight: NVFP4Tensor, way: str) -> None:
    x, ids = torch.randn(3, COLUMNS, generator=generator(0)), routing_ids("uniform", 3)
    expected = moe_gemm_nvfp4(x, weight, ids, way)
    with torch.device("meta"):
        assert torch.equal(moe_gemm_nvfp4(x, weight, ids, way), expected)


def test_each_pair_is_the_product_with_its_expert(weight: NVFP4Tensor) -> None:
    x = torch.randn(9, COLUMNS, generator=generator(3)).half()
    ids = routing_ids("not mine", 9)
    y = moe_gemm_nvfp4(x, weight, ids, "indirect", global_scale=0.5)
    assert y.dtype == torch.float16
    a = quantize_nvfp4(x, global_scale=0.5)
    for token, choice in itertools.product(range(9), range(CHOICES)):
        expert = int(ids[token, choice])
        row = y[token, choice]
        if expert == EXPERTS:
            assert not row.any()
        else:
            expected = gemm_nvfp4(a, weight.expert(expert), out_dtype=torch.float16)[token]
            assert torch.equal(row, expected)


def test_rows_of_their_own_for_each_choice(weight: NVFP4Tensor) -> None:
    x = torch.randn(5, CHOICES, COLUMNS, generator=generator(4))
    ids = routing_ids("uniform", 5)
    y = moe_gemm_nvfp4(x, weight, ids)
    for choice in range(CHOICES):
        one = moe_gemm_nvfp4(x[:, choice].contiguous(), weight, ids[:, choice : choice + 1])
        assert torch.equal(y[:, choice : choice + 1], one)
    with pytest.raises(ValueError, match='use dedup="off"'):
        moe_gemm_nvfp4(x, weight, ids, "gather")


def test_row_scales_are_read_by_row_of_a(weight: NVFP4Tensor) -> None:
    x = torch.randn(6, COLUMNS, generator=generator(5))
    routing = route(routing_ids("uniform", 6), EXPERTS)
    scaled = quantize_nvfp4(x, row_scale=True)
    indirect = quantize_for_experts(x, routing, "indirect")
    y = expert_product(type(indirect)(scaled, routing.source, 6, 0), routing, weight, out_dtype=torch.float32)
    for row, token in enumerate(routing.source.tolist()):
        expert = int(torch.searchsorted(routing.bounds, row, right=True)) - 1
        expected = gemm_nvfp4(scaled, weight.expert(expert), out_dtype=torch.float32)[token]
        assert torch.equal(y[row], expected)


def test_tiles_do_not_show_under_exact(weight: NVFP4Tensor) -> None:
    x = torch.randn(32, COLUMNS, generator=generator(6))
    routing = route(routing_ids("zipf", 32), EXPERTS)
    a = quantize_for_experts(x, routing, "gather")
    expected = expert_product(a, routing, weight)
    for tile in ("k1024", "k256", "k48"):
        assert torch.equal(expert_product(a, routing, weight, tile=tile), expected)


def test_experts_reproduce_the_decoded_product(weight: NVFP4Tensor) -> None:
    x = torch.randn(16, COLUMNS, generator=generator(7))
    ids = routing_ids("uniform", 16)
    y = moe_gemm_nvfp4(x, weight, ids, out_dtype=torch.float32)
    decoded = dequantize_nvfp4(weight).double()[ids.long()]  # [T, U, N, K]
    true = torch.einsum("tk,tunk->tun", dequantize_nvfp4(quantize_nvfp4(x)).double(), decoded)
    assert torch.allclose(y.double(), true, rtol=2e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([torch.float16, torch.bfloat16, torch.float32]))
def test_combine_adds_in_the_order_of_choices(tokens: int, choices: int, dtype: torch.dtype) -> None:
    draw = generator(tokens * 8 + choices)
    y = torch.randn(tokens, choices, 7, generator=draw).to(dtype)
    p = torch.rand(tokens, choices, generator=draw)
    expected = torch.zeros(tokens, 7)
    for choice in range(choices):
        expected = expected + y[:, choice].float() * p[:, choice, None]
    assert torch.equal(moe_combine(y, p), expected.to(dtype))
    inverse = torch.randperm(tokens * choices, generator=draw).int().view(tokens, choices)
    by_row = torch.empty_like(y).view(-1, 7)
    by_row[inverse.flatten().long()] = y.view(-1, 7)
    assert torch.equal(combine_sorted(by_row, inverse, p), expected.to(dtype))


def call(**changes: object) -> None:
    w = quantize_nvfp4(torch.zeros(4, 3, 32))
    arguments = {"x": torch.zeros(2, 32), "w": w, "ids": torch.zeros(2, 2, dtype=torch.int32)}
    moe_gemm_nvfp4(**{**arguments, **changes})


ERRORS = {
    "dedup": ({"dedup": "on"}, ValueError, "off, gather, scatter, indirect, got 'on'"),
    "ids dtype": ({"ids": torch.zeros(2, 2)}, TypeError, "^moe_gemm_nvfp4: ids must be int32 or int64, got"),
    "ids rank": ({"ids": torch.zeros(2, dtype=torch.int32)}, ValueError, r"ids must be \[T, U\]"),
    "id too large": ({"ids": torch.full((2, 2), 5).int()}, ValueError, r"ids must be in 0..4, got 5..5"),
    "id negative": ({"ids": torch.full((2, 2), -1).int()}, ValueError, r"got -1..-1"),
    "tokens": ({"x": torch.zeros(3, 32)}, ValueError, r"x must be \[2, K\] or \[2, 2, K\]"),
    "columns": ({"x": torch.zeros(2, 48)}, ValueError, r"a must be \[M, 32\]"),
    "one matrix": ({"w": quantize_nvfp4(torch.zeros(4, 32))}, ValueError, r"w must be \[4, N, K\]"),
    "dtype": ({"x": torch.zeros(2, 32).long()}, TypeError, "got torch.int64"),
    "no tensor": ({"x": [[0.0] * 32]}, TypeError, "x must be a tensor, got list"),
    "ids of no tensor": ({"ids": [[0, 1]]}, TypeError, "ids must be a tensor, got list"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_wrong(name: str) -> None:
    changes, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize("dedup", DEDUP)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ties": "evn"}, ValueError, 'ties must be "zero" or "even", got \'evn\''),
        ({"global_scale": 0.0}, ValueError, "positive normal float32, got 0.0"),
        ({"search": 0.5}, TypeError, "search must be True or False, got 0.5\\."),
        ({"out_dtype": 0}, TypeError, "out_dtype must be"),
        ({"global_scale": -1.0}, ValueError, "positive normal float32, got -1.0"),
        ({"x": torch.zeros(2, 32).double()}, TypeError, "x must be .*, got torch.float64"),
    ],
)
def test_every_way_asks_the_same_of_its_arguments(
    dedup: str, changes: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(dedup=dedup, **changes)


def test_combine_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"p \[T, U\], got"):
        moe_combine(torch.zeros(2, 3, 4), torch.zeros(3, 2))
    with pytest.raises(TypeError, match="p must be float32"):
        moe_combine(torch.zeros(2, 3, 4), torch.zeros(2, 3).half())
    with pytest.raises(TypeError, match="y must be float32, float16 or bfloat16, got torch.float64"):
        moe_combine(torch.zeros(2, 3, 4).double(), torch.zeros(2, 3))
    for experts in (None, 1.5, 2**31):
        with pytest.raises(ValueError, match=r"num_experts a whole number in 1\.\.2\^31 - 1, got"):
            moe_align(torch.zeros(1, 1, dtype=torch.int32), experts)
    with pytest.raises(TypeError, match="y must be a tensor, got list"):
        moe_combine([[[1.0]]], torch.zeros(1, 1))
