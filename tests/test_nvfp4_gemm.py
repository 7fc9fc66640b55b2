"""Products under the three contracts: exact sums in rational arithmetic, one-hot rows, order, errors."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvfp4_exactly as exactly
from kbit import nvfp4
from kbit.nvfp4 import NVFP4Tensor, dequantize_nvfp4, gemm_nvfp4, quantize_nvfp4, repack_nvfp4, tiles_nvfp4
from kbit.nvfp4.formats import e2m1, ue4m3
from kbit.nvfp4.reference.quantize import decode

F32 = torch.float32


def random_tensor(rows: int, columns: int, seed: int, factor: float = 1.0) -> NVFP4Tensor:
    """Any codes and any scales: far wilder than what a quantizer gives."""
    draw = torch.Generator().manual_seed(seed)
    groups = -(-columns // 16)
    codes = torch.randint(16, (rows, groups * 16), generator=draw).to(torch.uint8)
    codes[:, columns:] = 0
    scales = torch.randint(0x7F, (rows, groups), generator=draw).to(torch.uint8)
    return NVFP4Tensor(e2m1.pack(codes), scales, torch.tensor(factor), (rows, columns))


def exact_sums(a: NVFP4Tensor, w: NVFP4Tensor) -> list[list[Fraction]]:
    left, right = (
        [[Fraction(value) for value in row] for row in decode(*t.nv()).double().tolist()] for t in (a, w)
    )
    return [[sum((x * y for x, y in zip(r, c, strict=True)), Fraction(0)) for c in right] for r in left]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 90), st.integers(0, 2**32))
def test_exact_is_the_rounded_exact_sum(rows: int, outputs: int, columns: int, seed: int) -> None:
    a, w = random_tensor(rows, columns, seed), random_tensor(outputs, columns, seed + 1)
    expected = [[exactly.round32(total) for total in row] for row in exact_sums(a, w)]
    for tile in (None, *tiles_nvfp4("exact")):
        assert gemm_nvfp4(a, w, "exact", F32, tile).tolist() == expected


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 90), st.integers(0, 2**32))
def test_seq16_adds_exact_partials_in_order(rows: int, outputs: int, columns: int, seed: int) -> None:
    a, w = random_tensor(rows, columns, seed), random_tensor(outputs, columns, seed + 1)
    left, right = (decode(*t.nv()).double() for t in (a, w))
    total = torch.zeros(rows, outputs, dtype=F32)
    for group in range(left.shape[1] // 16):
        part = slice(16 * group, 16 * group + 16)
        products = left[:, None, part] * right[None, :, part]
        partial = products.sum(-1)  # exact: 24 bits of difference at most, of float64's 53
        assert torch.equal(partial.float().double(), partial)
        total = total + partial.float()
    assert torch.equal(gemm_nvfp4(a, w, "seq16", F32), total)
    assert torch.equal(gemm_nvfp4(a, w, "tc", F32), total)


def test_all_products_of_two_operands_are_exact() -> None:
    """Every code and scale against every code and scale, alone in its sum: 4.1 million products."""
    values = (ue4m3.table()[:0x7F, None] * e2m1.decode(torch.arange(16, dtype=torch.uint8))).flatten()
    codes = torch.zeros(127 * 16, 16, dtype=torch.uint8)
    codes[:, 0] = torch.arange(127 * 16) % 16
    scales = (torch.arange(127 * 16) // 16).to(torch.uint8)[:, None]
    t = NVFP4Tensor(e2m1.pack(codes), scales, torch.ones(()), (127 * 16, 16))
    exact_products = values.double()[:, None] * values.double()
    for accum in ("exact", "seq16", "tc"):
        y = gemm_nvfp4(t, t, accum, F32)
        assert torch.equal(y.double(), exact_products)
        assert not torch.signbit(y[y == 0]).any()  # a zero sum is +0


@pytest.mark.parametrize("accum", ["exact", "seq16", "tc"])
def test_one_hot_rows_return_the_decoded_weight(accum: str) -> None:
    w = random_tensor(7, 48, 3, factor=0.37)
    # Not by the quantizer: no candidate for a block with amax 1 holds 1 exactly.
    ones = torch.full((48, 3), 0x38, dtype=torch.uint8)
    eye = NVFP4Tensor(e2m1.pack(2 * torch.eye(48).byte()), ones, torch.ones(()), (48, 48))
    assert torch.equal(dequantize_nvfp4(eye), torch.eye(48))
    for dtype in (torch.float16, torch.bfloat16, F32):
        assert torch.equal(gemm_nvfp4(eye, w, accum, dtype), dequantize_nvfp4(w, dtype).t() + 0.0)


def test_exact_holds_the_largest_sums() -> None:
    """All operands at 2688 with K = 2^20, the most that is allowed, and the smallest beside the largest."""
    columns = 1 << 20
    full = NVFP4Tensor(
        torch.full((1, columns // 2), 0x77, dtype=torch.uint8),
        torch.full((1, columns // 16), 0x7E, dtype=torch.uint8),
        torch.ones(()),
        (1, columns),
    )
    assert gemm_nvfp4(full, full, "exact", F32).item() == 2688.0**2 * columns
    mixed = full.codes.clone()
    mixed[0, : columns // 4] = 0xFF  # half of them negative: the large terms cancel
    mixed[0, 0], scales = 0x1F, full.scales.clone()
    other = NVFP4Tensor(mixed, scales, torch.ones(()), (1, columns))
    # Element 1 is 0.5 instead of -6, so the sum is (6 + 0.5) * 448 * 2688.
    assert gemm_nvfp4(other, full, "exact", F32).item() == 6.5 * 448 * 2688


def one_per_block(values: list[tuple[int, int]]) -> NVFP4Tensor:
    """A row whose blocks hold one element each, given as (code, scale byte)."""
    codes = torch.zeros(1, 16 * len(values), dtype=torch.uint8)
    codes[0, ::16] = torch.tensor([code for code, _ in values], dtype=torch.uint8)
    scales = torch.tensor([[byte for _, byte in values]], dtype=torch.uint8)
    return NVFP4Tensor(e2m1.pack(codes), scales, torch.ones(()), tuple(codes.shape))


def test_exact_rounds_ties_to_even_and_sees_the_last_bit() -> None:
    large, one, tiny = (6, 0x78), (2, 0x38), (1, 0x01)  # 1024, 1 and 2^-10
    cases = {(1, 0): 0, (2, 0): 2, (3, 0): 4, (1, 1): 2, (3, 1): 4, (0, 1): 0}
    for (ones, tinies), above in cases.items():
        t = one_per_block([large] * 16 + [one] * ones + [tiny] * tinies)  # 2^24 + ones + 2^-20
        assert gemm_nvfp4(t, t, "exact", F32).item() == 2**24 + above


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("accum", "tile"), [("seq16", "tokens8/split2"), ("exact", "tokens7"), ("tc", "k48")]
)
def test_a_tile_of_another_contract_is_refused(accum, tile, device) -> None:
    a, w = random_tensor(9, 2000, 5).to(device), random_tensor(33, 2000, 6).to(device)
    with pytest.raises(ValueError, match=f"under '{accum}' a tile may be .*None here, got '{tile}'"):
        gemm_nvfp4(a, w, accum, F32, tile)


def test_tiles_and_splits_do_not_show_under_exact() -> None:
    a, w = random_tensor(9, 2000, 5), random_tensor(33, 2000, 6)
    expected = gemm_nvfp4(a, w, "exact", F32)
    names = tiles_nvfp4("exact")
    assert len(names) > 1
    for tile in names:
        assert torch.equal(gemm_nvfp4(a, w, "exact", F32, tile), expected)
    # The order of K does not either, 16 columns at a time.
    order = torch.randperm(125)
    columns = (order[:, None] * 8 + torch.arange(8)).flatten()
    shuffled = [NVFP4Tensor(t.codes[:, columns], t.scales[:, order], t.global_scale, t.shape) for t in (a, w)]
    assert torch.equal(gemm_nvfp4(*shuffled, "exact", F32), expected)


def test_seq16_does_depend_on_the_order() -> None:
    a, w = random_tensor(9, 2000, 5), random_tensor(33, 2000, 6)
    assert not torch.equal(gemm_nvfp4(a, w, "seq16", F32), gemm_nvfp4(a, w, "exact", F32))


@pytest.mark.parametrize("accum", ["exact", "seq16", "tc"])
def test_autocast_changes_no_bit(accum: str) -> None:
    a, w = quantize_nvfp4(torch.randn(4, 256)), quantize_nvfp4(torch.randn(8, 256))
    expected = gemm_nvfp4(a, w, accum, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gemm_nvfp4(a, w, accum, torch.float32), expected)


def test_epilogue_rounds_after_each_factor() -> None:
    a, w = random_tensor(5, 96, 1, factor=0.3), random_tensor(6, 96, 2, factor=1e-3)
    rows = torch.rand(5) + 0.1
    a = NVFP4Tensor(a.codes, a.scales, a.global_scale, a.shape, row_scale=rows)
    plain = NVFP4Tensor(a.codes, a.scales, torch.ones(()), a.shape)
    total = gemm_nvfp4(plain, NVFP4Tensor(w.codes, w.scales, torch.ones(()), w.shape), "exact", F32)
    expected = total * (torch.tensor(0.3) * torch.tensor(1e-3)) * rows[:, None]
    for dtype in (F32, torch.float16, torch.bfloat16):
        assert torch.equal(gemm_nvfp4(a, w, "exact", dtype), expected.to(dtype))


def test_layouts_do_not_show() -> None:
    a, w = random_tensor(3, 100, 1), random_tensor(4, 100, 2)
    expected = gemm_nvfp4(a, w, out_dtype=F32)
    for layout in ("ggml", "mmq"):
        assert torch.equal(
            gemm_nvfp4(repack_nvfp4(a, layout), repack_nvfp4(w, layout), out_dtype=F32), expected
        )


def test_contracts_agree_within_float32() -> None:
    x, weight = torch.randn(16, 512), torch.randn(32, 512)
    a, w = quantize_nvfp4(x), quantize_nvfp4(weight)
    true = dequantize_nvfp4(a).double() @ dequantize_nvfp4(w).double().t()
    # K / 16 additions, each within half a unit of the running sum.
    bound = (dequantize_nvfp4(a).abs() @ dequantize_nvfp4(w).abs().t()) * 2.0**-24 * 32
    for accum in ("exact", "seq16", "tc"):
        assert ((gemm_nvfp4(a, w, accum, F32).double() - true).abs() <= bound).all()


def test_no_rows_and_row_independence() -> None:
    a, w = random_tensor(5, 64, 1), random_tensor(6, 64, 2)
    for accum in ("exact", "seq16", "tc"):
        y = gemm_nvfp4(a, w, accum)
        for row in range(5):
            one = NVFP4Tensor(a.codes[row : row + 1], a.scales[row : row + 1], a.global_scale, (1, 64))
            assert torch.equal(gemm_nvfp4(one, w, accum)[0], y[row])
        none = NVFP4Tensor(a.codes[:0], a.scales[:0], a.global_scale, (0, 64))
        assert gemm_nvfp4(none, w, accum).shape == (0, 6)


def product_with(**changes: object) -> None:
    a, w = random_tensor(2, 32, 0), random_tensor(3, 32, 0)
    gemm_nvfp4(**{"a": a, "w": w, **changes})


def stack() -> NVFP4Tensor:
    return NVFP4Tensor.stack([random_tensor(3, 32, 0)])


def with_rows(t: NVFP4Tensor) -> NVFP4Tensor:
    return NVFP4Tensor(t.codes, t.scales, t.global_scale, t.shape, row_scale=torch.ones(t.shape[0]))


ERRORS = {
    "accum": ({"accum": "fast"}, ValueError, "exact, seq16, tc, got 'fast'"),
    "out_dtype": ({"out_dtype": torch.float64}, TypeError, "out_dtype must be"),
    "columns": (
        {"a": random_tensor(2, 48, 0), "where": "mlp.up"},
        ValueError,
        r"a must be \[M, 32\].*\(mlp.up\)",
    ),
    "stack": ({"w": stack()}, ValueError, "Use moe_gemm_nvfp4"),
    "stack of activations": ({"a": stack()}, ValueError, r"a must be \[M, 32\]"),
    "row scale of w": ({"w": with_rows(random_tensor(3, 32, 0))}, ValueError, "only activations"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_wrong(name: str) -> None:
    changes, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        product_with(**changes)


def test_plain_tensors_are_refused() -> None:
    x, w = torch.randn(2, 32), random_tensor(3, 32, 0)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    for name, call in {
        "gemm_nvfp4: a": lambda: gemm_nvfp4(x, w),
        "gemm_nvfp4: w": lambda: gemm_nvfp4(w, x),
        "linear_nvfp4: w": lambda: nvfp4.linear_nvfp4(x, x),
        "moe_gemm_nvfp4: w": lambda: nvfp4.moe_gemm_nvfp4(x, x, ids),
        "dequantize_nvfp4: t": lambda: nvfp4.dequantize_nvfp4(x),
        "repack_nvfp4: t": lambda: nvfp4.repack_nvfp4(x, "nv"),
    }.items():
        with pytest.raises(TypeError, match=f"{name} must be an NVFP4Tensor, got Tensor. Make one: kbit"):
            call()


def test_too_many_columns() -> None:
    t = NVFP4Tensor(
        torch.zeros(1, 2**19 + 8, dtype=torch.uint8),
        torch.zeros(1, 2**16 + 1, dtype=torch.uint8),
        torch.ones(()),
        (1, 2**20 + 16),
    )
    with pytest.raises(ValueError, match="K must be at most 1048576"):
        gemm_nvfp4(t, t)


def test_infinite_factors_do_not_hide() -> None:
    a = random_tensor(1, 16, 0, factor=1e30)
    w = NVFP4Tensor(a.codes, a.scales, torch.tensor(1e30), a.shape)
    assert math.isinf(gemm_nvfp4(a, w, out_dtype=F32).item())


@pytest.mark.parametrize("layout", ["nv", "tiled"])
def test_16_bit_activations_under_autocast_and_differentiated(layout: str) -> None:
    x, w = torch.randn(3, 64), repack_nvfp4(quantize_nvfp4(torch.randn(8, 64)), layout)
    expected = nvfp4.linear_nvfp4(x, w)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(nvfp4.linear_nvfp4(x, w), expected)  # in x's dtype
        torch.testing.assert_close(nvfp4.linear_nvfp4(x.clone().requires_grad_(), w).detach(), expected)
    _, tangent = torch.func.jvp(lambda a: nvfp4.linear_nvfp4(a, w), (x,), (x,))
    torch.testing.assert_close(tangent, expected)
    grad = torch.func.grad(lambda a: nvfp4.linear_nvfp4(a, w).sum())(x)
    torch.testing.assert_close(grad, dequantize_nvfp4(w).sum(0).expand_as(x))


@pytest.mark.parametrize("accum", ["exact", "seq16", "tc"])
def test_the_default_device_is_not_asked(accum: str) -> None:
    x, w = torch.randn(3, 64), torch.randn(8, 64)
    expected = gemm_nvfp4(quantize_nvfp4(x, row_scale=True), quantize_nvfp4(w), accum)
    with torch.device("meta"):
        a, b = quantize_nvfp4(x, row_scale=True), quantize_nvfp4(w)
        assert torch.equal(gemm_nvfp4(a, b, accum), expected)
        assert dequantize_nvfp4(b).device.type == "cpu"
        assert nvfp4.global_scale_for(w) > 0
