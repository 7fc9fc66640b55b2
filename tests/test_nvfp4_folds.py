"""Producer folds: the same bits as the stand-alone operation and the quantizer, in the stated order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kbit.nvfp4 import (
    dequantize_nvfp4,
    exact,
    linear_nvfp4,
    quantize_nvfp4,
    rmsnorm,
    rmsnorm_quantize_nvfp4,
    silu_mul,
    silu_mul_quantize_nvfp4,
)
from kbit.nvfp4.reference.folds import sum_of_squares

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
F32 = torch.float32


def by_threads(row: torch.Tensor) -> torch.Tensor:
    """The sum of squares as 256 threads compute it, one operation after the other."""
    partial = [torch.zeros(()) for _ in range(256)]
    for thread in range(256):
        for stride in range(0, len(row), 2048):
            for column in range(stride + 8 * thread, min(stride + 8 * thread + 8, len(row))):
                partial[thread] = exact.fma(row[column], row[column], partial[thread])
    for lane_mask in (16, 8, 4, 2, 1):
        partial = [partial[thread] + partial[thread ^ lane_mask] for thread in range(256)]
    total = partial[0]
    for warp in range(1, 8):
        total = total + partial[32 * warp]
    return total


@pytest.mark.parametrize("columns", [1, 31, 300, 2048, 2100])
def test_the_sum_of_squares_is_that_of_256_threads(columns: int) -> None:
    rows = torch.randn(2, columns, generator=torch.Generator().manual_seed(columns))
    expected = torch.stack([by_threads(row) for row in rows])
    assert torch.equal(sum_of_squares(rows), expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 200), st.sampled_from(DTYPES), st.booleans())
def test_norm_fold_equals_norm_then_quantize(rows: int, columns: int, dtype: torch.dtype, add: bool) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + columns)
    x = torch.randn(rows, columns, generator=draw).to(dtype)
    weight = (1 + torch.randn(columns, generator=draw) / 8).to(dtype)
    residual = torch.randn(rows, columns, generator=draw).to(dtype) if add else None
    norm, h = rmsnorm(x, weight, 1e-6, residual)
    folded = rmsnorm_quantize_nvfp4(x, weight, 1e-6, residual)
    plain = quantize_nvfp4(norm)
    assert folded.norm is not None
    assert torch.equal(folded.norm, norm)
    assert torch.equal(folded.residual, h)
    assert torch.equal(folded.quantized.codes, plain.codes)
    assert torch.equal(folded.quantized.scales, plain.scales)
    assert rmsnorm_quantize_nvfp4(x, weight, 1e-6, residual, write_norm=False).norm is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(8, 96, generator=draw).to(dtype) for _ in range(2))
    weight = torch.rand(96, generator=draw).to(dtype)
    norm, h = rmsnorm(x, weight, 1e-6, residual)
    assert torch.equal(h, x + residual)  # rounded to the storage dtype before the squares
    wide = h.float()
    expected = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype)
    # One unit in the last place before the product, where float32's errors tip a rounding: the two sums of 96
    # squares, halved by the root, and eight operations.
    rtol = 2 * torch.finfo(dtype).eps + (96 + 8) * 2**-24
    assert torch.allclose(norm.float(), expected.float(), rtol=rtol, atol=0)
    assert rmsnorm(x, weight, 1e-6)[1] is x


def test_compiled_folds_have_the_same_bits() -> None:
    x, weight, gate_up = torch.randn(5, 300).bfloat16(), torch.randn(300).bfloat16(), torch.randn(5, 300)
    for call, args in ((rmsnorm, (x, weight, 1e-6, x)), (silu_mul, (gate_up.bfloat16(),))):
        expected, found = call(*args), torch.compile(call)(*args)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_default_device_may_be_another() -> None:
    x, weight = torch.randn(2, 64), torch.ones(64)
    folds = (lambda: silu_mul_quantize_nvfp4(x), lambda: rmsnorm_quantize_nvfp4(x, weight, 1e-6).quantized)
    for fold in folds:
        expected = fold()
        with torch.device("meta"):
            got = fold()
        assert torch.equal(dequantize_nvfp4(got), dequantize_nvfp4(expected))


def test_no_rows() -> None:
    x, weight = torch.zeros(0, 48), torch.ones(48)
    norm, h = rmsnorm(x, weight, 1e-6, x)
    assert norm.shape == h.shape == (0, 48)
    folded = rmsnorm_quantize_nvfp4(x, weight, 1e-6)
    assert folded.quantized.shape == (0, 48)
    assert silu_mul_quantize_nvfp4(x).shape == (0, 24)


def test_norm_of_zeros_and_of_large_numbers() -> None:
    weight = torch.ones(32)
    assert not rmsnorm(torch.zeros(1, 32), weight, 1e-6)[0].any()
    norm, _ = rmsnorm(torch.full((1, 32), 1e15), weight, 1e-6)
    assert torch.allclose(norm, torch.ones(1, 32))
    overflowing, _ = rmsnorm(torch.full((1, 32), 1e30), weight, 1e-6)  # the squares are infinite
    assert not overflowing.any()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(1, 100), st.sampled_from(DTYPES), st.sampled_from(["zero", "even"]))
def test_silu_fold_equals_silu_then_quantize(rows: int, half: int, dtype: torch.dtype, ties: str) -> None:
    draw = torch.Generator().manual_seed(rows * 1000 + half)
    gate_up = (torch.randn(rows, 2 * half, generator=draw) * 4).to(dtype)
    folded = silu_mul_quantize_nvfp4(gate_up, ties=ties, global_scale=0.5)
    plain = quantize_nvfp4(silu_mul(gate_up), ties=ties, global_scale=0.5)
    assert folded.shape == plain.shape
    assert torch.equal(folded.codes, plain.codes)
    assert torch.equal(folded.scales, plain.scales)


def test_silu_is_accurate_over_its_whole_range() -> None:
    gate = torch.cat([torch.linspace(-110, 110, 40_001), torch.tensor([-1e30, 1e30, 0.0, -0.0])])
    y = silu_mul(torch.cat([gate, torch.ones_like(gate)]).view(2, -1).t().contiguous().view(-1, 2))
    wide = gate.double()
    true = wide / (1 + torch.exp(-wide))
    error = (y[:, 0].double() - true).abs()
    # Below -88.7 exp is infinite and the result -0 instead of -3e-37 and less.
    assert (error <= 3 * 2.0**-23 * true.abs() + 2.0**-121).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_rounds_to_the_storage_dtype_before_the_product(dtype: torch.dtype) -> None:
    gate_up = (torch.randn(5, 64) * 3).to(dtype)
    gate, up = gate_up.chunk(2, dim=-1)
    activated = (gate.float() / (exact.exp(-gate.float()) + 1)).to(dtype)
    assert torch.equal(silu_mul(gate_up), activated * up)


ERRORS = {
    "rank": (lambda: rmsnorm(torch.zeros(2, 3, 4), torch.ones(4), 1e-6), ValueError, r"x must be \[M, K\]"),
    "weight": (lambda: rmsnorm(torch.zeros(2, 4), torch.ones(5), 1e-6), ValueError, r"weight \[K\]"),
    "dtype": (
        lambda: rmsnorm(torch.zeros(2, 4).double(), torch.ones(4), 1e-6),
        TypeError,
        "got torch.float64",
    ),
    "residual": (
        lambda: rmsnorm(torch.zeros(2, 4), torch.ones(4), 1e-6, torch.zeros(2, 4).half()),
        ValueError,
        "residual must be torch.float32",
    ),
    "devices": (
        lambda: rmsnorm(torch.zeros(2, 4), torch.ones(4, device="meta"), 1e-6),
        ValueError,
        "weight is on meta, the operand beside it on cpu",
    ),
    "odd": (lambda: silu_mul(torch.zeros(2, 5)), ValueError, r"gate_up must be \[R, 2I\]"),
    "gate dtype": (lambda: silu_mul(torch.zeros(2, 4).int()), TypeError, "got torch.int32"),
    "factor": (
        lambda: silu_mul_quantize_nvfp4(torch.zeros(2, 4), global_scale=-1.0),
        ValueError,
        "positive normal float32, got -1.0",
    ),
    "silu ties": (
        lambda: silu_mul_quantize_nvfp4(torch.zeros(2, 4), ties="evn"),
        ValueError,
        'silu_mul_quantize_nvfp4: ties must be "zero" or "even", got \'evn\'',
    ),
    "norm eps": (lambda: rmsnorm(torch.zeros(2, 4), torch.ones(4), None), ValueError, "eps must be a number"),
    "negative eps": (lambda: rmsnorm(torch.zeros(2, 4), torch.ones(4), -1e-6), ValueError, "got -1e-06"),
    "norm flag": (
        lambda: rmsnorm_quantize_nvfp4(torch.zeros(2, 4), torch.ones(4), 1e-6, write_norm=None),
        TypeError,
        "write_norm must be True or False, got None\\.",
    ),
    "norm ties": (
        lambda: rmsnorm_quantize_nvfp4(torch.zeros(2, 4), torch.ones(4), 1e-6, ties="evn"),
        ValueError,
        'rmsnorm_quantize_nvfp4: ties must be "zero" or "even", got \'evn\'',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_wrong(name: str) -> None:
    call, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("wrong", [[[1.0] * 32], np.zeros((1, 32), np.float32), None], ids=type)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("x", quantize_nvfp4),
        ("x", lambda value: linear_nvfp4(value, quantize_nvfp4(torch.zeros(8, 32)))),
        ("x", lambda value: rmsnorm(value, torch.ones(32), 1e-6)),
        ("weight", lambda value: rmsnorm(torch.ones(1, 32), value, 1e-6)),
        ("gate_up", silu_mul),
    ],
)
def test_what_is_no_tensor_is_named(name, call, wrong) -> None:
    with pytest.raises(TypeError, match=rf"\w+: {name} must be a tensor, got {type(wrong).__name__}"):
        call(wrong)
