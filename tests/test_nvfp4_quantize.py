"""The activation quantizer: golden bytes, both tie modes, special blocks, and exact rational arithmetic."""

from __future__ import annotations

import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvfp4_exactly as exactly
from kbit.nvfp4 import (
    NonFiniteError,
    NVFP4Tensor,
    dequantize_nvfp4,
    global_scale_for,
    quantize_nvfp4,
    repack_nvfp4,
)
from kbit.nvfp4.formats import e2m1, ue4m3

GOLDEN = json.loads((Path(__file__).parent / "golden" / "nvfp4_quantize.json").read_text())
F32 = torch.float32
LARGEST = torch.finfo(F32).max
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate = st.floats(-1000, 1000, width=32)


def codes_of(t: NVFP4Tensor) -> torch.Tensor:
    return e2m1.unpack(t.nv()[0])


def as_list(t: NVFP4Tensor) -> list[tuple[list[int], int]]:
    """(codes, scale byte) of each block."""
    codes = codes_of(t).reshape(-1, 16).tolist()
    return list(zip(codes, t.nv()[1].flatten().tolist(), strict=True))


def check_against_rationals(blocks: list[list[float]]) -> None:
    x = torch.tensor(blocks, dtype=F32)
    for search, ties in itertools.product((True, False), ("zero", "even")):
        expected = [exactly.quantize_block(block, search, ties == "even") for block in x.tolist()]
        assert as_list(quantize_nvfp4(x, search=search, ties=ties)) == expected, (search, ties)


# -- the bytes -----------------------------------------------------------------------------------------------


def test_golden_bytes_of_the_specification() -> None:
    x = torch.linspace(-1, 1, 16, dtype=F32)[None]
    assert quantize_nvfp4(x, search=False).scales.tolist() == [[0x23]]
    t = quantize_nvfp4(x)
    assert t.scales.tolist() == [[0x22]]
    assert bytes(t.codes[0].tolist()).hex(" ") == "ff ee cd 9b 31 54 66 77"
    ggml = repack_nvfp4(t, "ggml").codes[0]
    assert ggml[:4].tolist() == [0x22, 0, 0, 0]
    assert bytes(ggml[4:12].tolist()).hex(" ") == "1f 3f 4e 5e 6d 6c 7b 79"


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_golden_file(case: dict) -> None:
    x = torch.tensor(case["x_bits"], dtype=torch.int32).view(F32).view(case["shape"])
    for mode, (codes, scales) in case["bytes"].items():
        search, ties = mode.split("/")
        t = quantize_nvfp4(x, search=search == "search", ties=ties)
        assert bytes(t.codes.flatten().tolist()).hex() == codes
        assert bytes(t.scales.flatten().tolist()).hex() == scales


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(moderate, min_size=16, max_size=16), min_size=1, max_size=4))
def test_blocks_of_moderate_numbers(blocks: list[list[float]]) -> None:
    check_against_rationals(blocks)


@settings(max_examples=40, deadline=None)
@given(st.lists(finite, min_size=16, max_size=16))
def test_blocks_of_any_finite_numbers(block: list[float]) -> None:
    check_against_rationals([block])


def test_random_rows_in_every_dtype() -> None:
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16, F32):
        x = (torch.randn(4, 32, generator=draw) * 3).to(dtype)
        expected = [exactly.quantize_block(block, True, False) for block in x.float().view(-1, 16).tolist()]
        assert as_list(quantize_nvfp4(x)) == expected


def test_every_code_with_every_scale_comes_back() -> None:
    """All 127 x 16 products: a block that holds each magnitude has its own scale with error 0."""
    scale = ue4m3.table()[:0x7F]
    codes = torch.arange(16, dtype=torch.uint8)
    x = scale[:, None] * e2m1.decode(codes)
    for search, ties in itertools.product((True, False), ("zero", "even")):
        t = quantize_nvfp4(x, search=search, ties=ties)
        assert torch.equal(t.scales[:, 0].long(), torch.arange(0x7F))
        assert torch.equal(dequantize_nvfp4(t), x)
        # -0 is not below 0, so it has no sign; magnitudes of a zero scale have no index.
        expected = codes.clone()
        expected[8] = 0
        assert torch.equal(codes_of(t)[1:], expected.expand(0x7E, 16))


@pytest.mark.parametrize(
    ("ties", "expected"), [("zero", [0, 1, 2, 3, 4, 5, 6]), ("even", [0, 2, 2, 4, 4, 6, 6])]
)
def test_ties_of_magnitudes(ties: str, expected: list[int]) -> None:
    for byte in (1, 0x08, 0x38, 0x41, 0x7E):
        scale = ue4m3.table()[byte]
        middle = torch.tensor(e2m1.MIDPOINTS) * scale
        block = torch.cat([middle, -middle, 6 * scale[None], scale[None]])[None]
        t = quantize_nvfp4(block, search=False, ties=ties)
        assert t.scales.item() == byte
        # 1 / scale is not exact for every mantissa, so ties are ties only where it is.
        if byte & 7 == 0 or byte == 1:
            assert codes_of(t)[0, :7].tolist() == expected
            assert codes_of(t)[0, 7:14].tolist() == [code + 8 for code in expected]


def test_scale_midpoints_round_to_even() -> None:
    table = ue4m3.table()[:0x7F].double()
    amax = 6 * (table[1:] + table[:-1]) / 2
    x = torch.zeros(0x7E, 16, dtype=F32)
    x[:, 3] = amax.float()
    assert torch.equal(amax.float().double(), amax)
    lower = torch.arange(0x7E)
    assert torch.equal(quantize_nvfp4(x, search=False).scales[:, 0].long(), lower + (lower & 1))


# -- special blocks ------------------------------------------------------------------------------------------

SPECIAL = {
    "zeros": [0.0] * 16,
    "negative zeros": [-0.0] * 16,
    "one subnormal": [2.0**-149] + [0.0] * 15,
    "negative subnormals": [-(2.0**-140)] * 16,
    "below the smallest scale": [6 * 2.0**-10, -(2.0**-10)] * 8,
    "above the largest": [2689.0, -1e30] * 8,
    "largest": [LARGEST, -LARGEST] * 8,
    "one large": [448.0 * 6] + [1.0] * 15,
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_blocks(name: str) -> None:
    check_against_rationals([SPECIAL[name]])


def test_a_block_with_nan_or_inf_becomes_zero_and_its_neighbours_do_not() -> None:
    x = torch.linspace(-3, 3, 64, dtype=F32).view(2, 32)
    clean = quantize_nvfp4(x)
    for value in (math.nan, math.inf, -math.inf):
        y = x.clone()
        y[1, 20] = value
        t = quantize_nvfp4(y)
        assert t.scales[1, 1] == 0
        assert not t.codes[1, 8:].any()
        assert torch.equal(t.codes[0], clean.codes[0])
        assert torch.equal(t.codes[1, :8], clean.codes[1, :8])
        assert not dequantize_nvfp4(t)[1, 16:].any()


def test_check_counts_what_is_not_finite() -> None:
    x = torch.ones(3, 40)
    x[0, 39], x[1, 0], x[1, 1] = math.nan, math.inf, -math.inf
    with pytest.raises(
        NonFiniteError, match=r"3 NaN or Inf values .* zero 2 blocks of 16 \(layers.0.mlp\)"
    ) as error:
        quantize_nvfp4(x, check=True, where="layers.0.mlp")
    assert (error.value.count, error.value.blocks) == (3, 2)
    sent = pickle.loads(pickle.dumps(error.value))
    assert (str(sent), sent.count, sent.blocks, sent.where) == (str(error.value), 3, 2, "layers.0.mlp")
    quantize_nvfp4(torch.ones(3, 40), check=True)
    with pytest.raises(NonFiniteError, match="after scaling"):
        quantize_nvfp4(torch.full((1, 16), 1e30), global_scale=1e-20, check=True)


# -- shapes and factors --------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 70), st.sampled_from(["nv", "ggml", "mmq"]))
def test_any_number_of_columns_is_padded_with_zeros(rows: int, columns: int, layout: str) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns))
    t = quantize_nvfp4(x, layout=layout)
    padded = quantize_nvfp4(torch.nn.functional.pad(x, (0, -columns % 16)))
    assert torch.equal(t.nv()[0], padded.codes)
    assert torch.equal(t.nv()[1], padded.scales)
    assert dequantize_nvfp4(t).shape == x.shape


def test_rows_and_experts_are_independent() -> None:
    x = torch.randn(3, 5, 48)
    stack = quantize_nvfp4(x)
    for expert in range(3):
        for row in range(5):
            one = quantize_nvfp4(x[expert, row : row + 1])
            assert torch.equal(stack.codes[expert, row], one.codes[0])
            assert torch.equal(stack.scales[expert, row], one.scales[0])
    assert torch.equal(dequantize_nvfp4(stack)[1], dequantize_nvfp4(stack.expert(1)))


def test_no_rows() -> None:
    t = quantize_nvfp4(torch.zeros(0, 32))
    assert dequantize_nvfp4(t).shape == (0, 32)


def test_factors_divide_before_and_multiply_after() -> None:
    x = torch.randn(6, 64) * 1e-4
    scale = global_scale_for(x)
    assert scale == float(x.abs().amax() / torch.tensor(2688.0))
    t = quantize_nvfp4(x, global_scale=scale, row_scale=True)
    assert t.row_scale is not None
    inner = x / torch.tensor(scale)
    plain = quantize_nvfp4(inner / t.row_scale[:, None])
    assert torch.equal(t.codes, plain.codes)
    assert torch.equal(t.scales, plain.scales)
    assert torch.equal(t.row_scale, inner.abs().amax(1) / torch.tensor(2688.0))
    decoded = dequantize_nvfp4(plain) * torch.tensor(scale) * t.row_scale[:, None]
    assert torch.equal(dequantize_nvfp4(t), decoded)
    assert torch.equal(dequantize_nvfp4(t, torch.bfloat16), decoded.bfloat16())
    assert float((decoded - x).norm() / x.norm()) < 0.12


def test_factors_of_rows_without_a_usable_amax_are_1() -> None:
    x = torch.tensor([[0.0], [1e-44], [math.inf], [math.nan], [2688.0]]).expand(5, 16)
    t = quantize_nvfp4(x, row_scale=True)
    assert t.row_scale is not None
    assert t.row_scale.tolist() == [1.0] * 5
    assert global_scale_for(torch.zeros(2, 2)) == 1.0


def test_search_lowers_the_error() -> None:
    x = torch.randn(64, 256)
    error = [
        (dequantize_nvfp4(quantize_nvfp4(x, search=search)) - x).square().sum() for search in (False, True)
    ]
    assert error[1] < 0.96 * error[0]


def test_default_dtype_does_not_matter() -> None:
    x = torch.randn(4, 64, dtype=F32)
    expected, wide = quantize_nvfp4(x, row_scale=True), torch.randn(256, 4096, dtype=F32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        t = quantize_nvfp4(x, row_scale=True)
        assert torch.equal(t.codes, expected.codes)
        assert torch.equal(dequantize_nvfp4(t), dequantize_nvfp4(expected))
        tiles = repack_nvfp4(quantize_nvfp4(wide), "tiled")
    finally:
        torch.set_default_dtype(F32)
    assert torch.equal(tiles.codes, repack_nvfp4(quantize_nvfp4(wide), "tiled").codes)  # marks included


ERRORS = {
    "dtype": (
        lambda: quantize_nvfp4(torch.zeros(2, 16, dtype=torch.float64)),
        TypeError,
        "got torch.float64",
    ),
    "one dimension": (lambda: quantize_nvfp4(torch.zeros(16)), ValueError, r"\[M, K\]"),
    "no columns": (lambda: quantize_nvfp4(torch.zeros(2, 0)), ValueError, "K >= 1"),
    "ties": (lambda: quantize_nvfp4(torch.zeros(1, 16), ties="up"), ValueError, "got 'up'"),
    "layout": (lambda: quantize_nvfp4(torch.zeros(1, 16), layout="x"), ValueError, "nv, ggml, mmq"),
    "factor 0": (lambda: quantize_nvfp4(torch.zeros(1, 16), global_scale=0.0), ValueError, "positive normal"),
    "factor nan": (lambda: quantize_nvfp4(torch.zeros(1, 16), global_scale=math.nan), ValueError, "got nan"),
    "factor of a tensor": (
        lambda: quantize_nvfp4(torch.zeros(1, 16), global_scale=torch.ones(())),
        TypeError,
        r"must be a number or None, got Tensor\. Take float\(\)",
    ),
    "factor for a list": (lambda: global_scale_for([1.0]), TypeError, "global_scale_for: x must be"),
    "factor of a name": (
        lambda: quantize_nvfp4(torch.zeros(1, 16), global_scale="amax"),
        TypeError,
        "must be a number or None, got str",
    ),
    "factor too large": (
        lambda: quantize_nvfp4(torch.zeros(1, 16), global_scale=10**400),
        ValueError,
        "positive normal",
    ),
    "factor in the place of search": (
        lambda: quantize_nvfp4(torch.zeros(1, 16), 0.5),
        TypeError,
        "search must be True or False, got 0.5\\.",
    ),
    "flag": (lambda: quantize_nvfp4(torch.zeros(1, 16), check="all"), TypeError, "check must be True or"),
    "row factors": (lambda: quantize_nvfp4(torch.zeros(1, 16), row_scale=2.0), TypeError, "row_scale must"),
    "factor for integers": (lambda: global_scale_for(torch.ones(2).bool()), TypeError, "got torch.bool"),
    "row factors of a stack": (
        lambda: quantize_nvfp4(torch.zeros(2, 1, 16), row_scale=True),
        ValueError,
        "row_scale is for a matrix",
    ),
    "decoded dtype": (
        lambda: dequantize_nvfp4(quantize_nvfp4(torch.zeros(1, 16)), torch.int8),
        TypeError,
        "got torch.int8",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_wrong(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()
