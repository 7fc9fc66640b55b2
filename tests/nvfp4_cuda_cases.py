"""What the NVFP4 kernels of a device must give: the bytes of `kbit.nvfp4.reference`.

Run on a GPU by test_cuda_nvfp4.py, and on the CPU, with the CUDA sources compiled for it, by
test_cuda_nvfp4_on_cpu.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from unittest import mock

import torch

from bits import assert_same
from kbit.backends.cuda import driver
from kbit.backends.cuda import nvfp4 as cuda
from kbit.backends.cuda.nvfp4 import exact_wgmma, moe, products
from kbit.backends.cuda.nvfp4 import rows as cuda_rows
from kbit.format import nvfp4_layout
from kbit.nvfp4 import reference

F32 = torch.float32
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BOTH = (False, True)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, dtype: torch.dtype = F32, factor: float = 1.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(*shape, generator=generator(seed)) * factor).to(dtype)


def random_matrix(*lead: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes and all scale bytes, 0x7F and those with bit 7 too."""
    made = generator(seed + columns)
    codes = torch.randint(0, 256, (*lead, columns // 2), generator=made)
    scales = torch.randint(0, 256, (*lead, columns // 16), generator=made)
    return codes.to(torch.uint8), scales.to(torch.uint8)


def to(device: str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


# -- rows ----------------------------------------------------------------------------------------------------


def compare_quantize(
    device: str,
    x: torch.Tensor,
    global_scale: float = 1.0,
    modes: tuple[tuple[bool, bool], ...] = tuple(itertools.product((True, False), BOTH)),
) -> None:
    for search, ties_even in modes:
        how = (search, ties_even, global_scale)
        want = reference.quantize(x, *how)
        for few in few_or_many():
            have = cuda.quantize(x.to(device), *how)
            for name, *pair in zip(("codes", "scales"), have, want, strict=True):
                assert_same(name, *pair, x.dtype, tuple(x.shape), *how, few)
    compare_quantize_rows(device, x, *modes[0], global_scale)


def compare_quantize_rows(
    device: str, x: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> None:
    how = (search, ties_even, global_scale)
    want = reference.quantize_rows(x, *how)
    for few in few_or_many():
        have = cuda.quantize_rows(x.to(device), *how)
        for name, *pair in zip(("codes", "scales", "row_scale"), have, want, strict=True):
            assert_same(f"{name} of rows", *pair, x.dtype, tuple(x.shape), *how, few)


def few_or_many() -> Iterator[bool]:
    """Let any number of rows be few, and then many, for the quantizer has a kernel for either."""
    for few in (True, False):
        with mock.patch.object(cuda_rows, "_are_few", return_value=few):
            yield few


def check_cuts(device: str, shape: tuple[int, int]) -> None:
    """Every way to deal rows to threads gives the same bytes."""
    x = normal(*shape, dtype=torch.bfloat16)
    want = reference.quantize(x, True, False, 0.37)
    for cut in cuda_rows.CUTS:
        have = cuda_rows.quantize_cut(x.to(device), cut, True, False, 0.37)
        for name, *pair in zip(("codes", "scales"), have, want, strict=True):
            assert_same(name, *pair, cut)


def check_quantize(device: str, dtype: torch.dtype, shapes: list[tuple[int, int]]) -> None:
    """Columns that are no multiple of 16, factors, magnitudes, a zero block, NaN and Inf."""
    for m, k in shapes:
        for factor in (1.0, 1e-3, 300.0, 1e-30):
            x = normal(m, k, dtype=dtype, factor=factor, seed=m + k)
            x[0, :16] = 0
            x[-1, -1] = -0.0
            compare_quantize(device, x)
            compare_quantize(device, x, 0.37)
            x[1, k // 2] = float("nan")
            x[2, -1] = float("-inf")
            compare_quantize(device, x, 3.0)


def check_thresholds(device: str) -> None:
    """Numbers whose quotient by the scale is a midpoint of magnitudes, or beside it, for every scale."""
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0, 6, 0.5, 1, 1.5, 2, 3, 4, -6])
    beside = [values, *(torch.nextafter(values, torch.tensor(to)) for to in (9.0, -9.0))]
    scales = [mantissa * 2.0**exponent for mantissa in range(8, 16) for exponent in range(-9, 6)]
    x = torch.cat([torch.stack(beside) * scale for scale in scales]).view(12, -1)
    every = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[:, None]
    for dtype in DTYPES:
        compare_quantize(device, x.to(dtype))
        integers = torch.int32 if dtype == F32 else torch.int16
        midpoints, largest = (values[:7] * every).to(dtype).view(integers), (6 * every).to(dtype)
        for step in (-1, 0, 1):
            beside = (midpoints + step).view(dtype)
            compare_quantize(device, torch.cat([beside, largest, -beside, -0.0 * largest], dim=1))


def check_scales(device: str) -> None:
    """Block maxima at every midpoint of scales, and beside it; any bits at all."""
    steps = [2.0**-9 * i / 8 for i in range(80)]
    steps += [2.0**e * (1 + i / 64) for e in range(-6, 10) for i in range(64)]
    maxima = 6 * torch.tensor(steps)
    maxima = torch.cat([maxima, *(torch.nextafter(maxima, torch.tensor(to)) for to in (0.0, 9e9))])
    x = torch.zeros(len(maxima), 16)
    x[:, 3], x[:, 5] = -maxima, 0.3 * maxima
    for dtype in DTYPES:
        compare_quantize(device, x.view(12, -1).to(dtype))
    made = generator(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (20, 1600), generator=made).int()
    compare_quantize(device, bits.view(F32))
    for dtype in DTYPES[1:]:
        compare_quantize(device, bits.short().view(dtype))


def check_row_scale(device: str, shapes: list[tuple[int, int]]) -> None:
    """Rows of zeros, of numbers so small or large that their factor is 1, NaN and Inf; any columns.

    Largest values from 2^-130 to 2^120 beside such that are a millionth of them, and less.
    """
    for (m, k), dtype in itertools.product(shapes, DTYPES):
        x = normal(m, k, dtype=dtype, seed=m + k)
        special = (0.0, 1e-37, float("nan"), float("-inf"), torch.finfo(dtype).max)
        for row, value in zip(range(1, m), special, strict=False):
            x[row, k * row // m] = value
        x[-1] *= 0
        for global_scale in (1.0, 0.37, 1e-30):
            compare_quantize_rows(device, x, True, False, global_scale)
    exponents = torch.linspace(-130, 120, 26)[:, None] - 24 * torch.rand(26, 80, generator=generator()) ** 2
    x = normal(26, 80) * 2.0**exponents
    for dtype, ties_even in itertools.product(DTYPES, BOTH):
        compare_quantize_rows(device, x.to(dtype), False, ties_even, 1.0)


def check_dequantize(device: str) -> None:
    codes, scales = random_matrix(6, columns=80)
    row_scale = torch.rand(6, generator=generator())
    for dtype in DTYPES:
        for global_scale, rows in ((1.0, None), (0.3, None), (0.3, row_scale)):
            there = to(device, codes, scales, rows)
            have = cuda.dequantize(there[0], there[1], global_scale, there[2], dtype)
            want = reference.dequantize(codes, scales, global_scale, rows, dtype)
            assert_same("out", have, want, dtype, global_scale, rows is not None)


def check_repack(device: str) -> None:
    for lead in ((), (3,)):
        for groups in (1, 4, 5, 32, 33):
            codes, scales = random_matrix(*lead, 5, columns=16 * groups)
            for layout in ("ggml", "mmq"):
                have = cuda.repack(*to(device, codes, scales), layout)
                assert_same(layout, have, reference.repack(codes, scales, layout), lead, groups)


def check_copies(device: str) -> None:
    """Gathering rows of every word size; scattering what was quantized once."""
    rows = torch.tensor([8, 0, 0, 3, 7], dtype=torch.int32)
    for groups in (1, 2, 3, 4, 16, 64):
        parts = random_matrix(9, columns=16 * groups)
        have = cuda.gather_rows(*to(device, *parts, rows))
        for name, one, other in zip(
            ("codes", "scales"), have, reference.gather_rows(*parts, rows), strict=True
        ):
            assert_same(name, one, other, groups)
    x = normal(5, 96, dtype=torch.bfloat16)
    slots = torch.randperm(15, generator=generator()).int().view(5, 3)
    have = cuda.quantize_scatter(*to(device, x, slots), True, False, 0.5)
    want = reference.quantize_scatter(x, slots, True, False, 0.5)
    for name, one, other in zip(("codes", "scales"), have, want, strict=True):
        assert_same(name, one, other)


# -- folds ---------------------------------------------------------------------------------------------------


def check_norm(device: str, dtype: torch.dtype, columns: list[int]) -> None:
    for k in columns:
        x, residual = normal(3, k, dtype=dtype), normal(3, k, dtype=dtype, seed=1)
        for weight_dtype, other in itertools.product({dtype, F32}, (None, residual)):
            weight = normal(k, dtype=weight_dtype, seed=2)
            there = to(device, x, weight, other)
            want = reference.rmsnorm(x, weight, 1e-6, other)
            have = cuda.rmsnorm(there[0], there[1], 1e-6, there[2])
            for name, one, expected in zip(("norm", "h"), have, want, strict=True):
                assert_same(name, one, expected, dtype, weight_dtype, k, other is not None)
            for write, ties_even, factor in ((True, False, 1.0), (False, True, 0.7)):
                options = (write, True, ties_even, factor)
                have = cuda.rmsnorm_quantize(there[0], there[1], 1e-6, there[2], *options)
                want = reference.rmsnorm_quantize(x, weight, 1e-6, other, *options)
                for name, one, expected in zip(("codes", "scales", "norm", "h"), have, want, strict=True):
                    assert (one is None) == (expected is None)
                    if one is not None:
                        assert_same(name, one, expected, dtype, weight_dtype, k, options)


def check_silu(device: str, dtype: torch.dtype, columns: list[int]) -> None:
    for k in columns:
        gate_up = normal(4, 2 * k, dtype=dtype, factor=4.0)
        extremes = torch.tensor([-200.0, 88.7, -88.7, 200.0])[: 2 * k]
        gate_up[1, : len(extremes)] = extremes
        there = gate_up.to(device)
        assert_same("product", cuda.silu_mul(there), reference.silu_mul(gate_up), dtype, k)
        gate_up[2, 0], gate_up[3, k] = float("nan"), float("inf")
        for ties_even, factor in ((False, 1.0), (True, 0.3)):
            have = cuda.silu_mul_quantize(gate_up.to(device), True, ties_even, factor)
            want = reference.silu_mul_quantize(gate_up, True, ties_even, factor)
            for name, one, expected in zip(("codes", "scales"), have, want, strict=True):
                assert_same(name, one, expected, dtype, k, ties_even, factor)


# -- products ------------------------------------------------------------------------------------------------


def check_gemm(
    device: str, accum: str, shapes: list[tuple[int, int, int]], tiles: tuple[str | None, ...]
) -> None:
    """Every tile gives the reference's bytes; `exact` and `seq16`."""
    for m, n, k in shapes:
        a, w = random_matrix(m, columns=k), random_matrix(n, columns=k, seed=1)
        row_scale = torch.rand(m, generator=generator())
        there = to(device, *a, *w)
        for dtype, rows in ((torch.float32, None), (torch.bfloat16, row_scale), (torch.float16, None)):
            factor = 0.013 if dtype != torch.float16 else 1e-7
            want = reference.gemm(*a, *w, factor, rows, accum, dtype)
            for tile in tiles:
                have = cuda.gemm(*there, factor, *to(device, rows), accum, dtype, tile)
                assert_same("y", have, want, accum, m, n, k, tile)


SPREADS = ("any", "even", "steep", "full")

SPREAD_PAIRS = tuple(itertools.product(SPREADS, SPREADS))


def spread_matrix(spread: str, rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of which float32 holds the sums of 256 products, or only of 64, or of 16.

    Args:
        spread: "even", scales within two octaves; "steep", the largest codes and scales from one to five
            octaves, more from tile to tile; "full", of one sign, sums of 256 products close to 2^24 units;
            "any", any bytes.
        rows, columns, seed: as in `random_matrix`.
    """
    codes, scales = random_matrix(rows, columns=columns, seed=seed)
    made = generator(seed + rows)
    if spread == "even":
        scales = torch.randint(0x38, 0x48, scales.shape, generator=made).to(torch.uint8)
    elif spread == "steep":
        codes = torch.where(torch.rand(codes.shape, generator=made) < 0.7, 0x77, codes).to(torch.uint8)
        octaves = torch.arange(scales.shape[1]) // 4 % 5 + 1
        fields = (torch.rand(scales.shape, generator=made) * octaves).int()
        scales = (8 * fields + 0x2F).to(torch.uint8)
    elif spread == "full":
        codes = torch.where(torch.rand(codes.shape, generator=made) < 0.98, 0x77, codes & 0x77).to(
            torch.uint8
        )
        scales = torch.full_like(scales, 0x3F)
        scales[:, ::4] += 8
    return codes, scales


def check_exact_tiles(
    device: str, shapes: list[tuple[int, int, int]], spreads: Iterable[tuple[str, str]]
) -> None:
    """`exact` with a weight in tiles: the reference's bytes. Spreads are those of activations and weights."""
    for (m, n, k), (of_a, of_w) in itertools.product(shapes, spreads):
        a, w = spread_matrix(of_a, m, k), spread_matrix(of_w, n, k, seed=1)
        row_scale = torch.rand(m, generator=generator())
        there = to(device, *a, nvfp4_layout.to_tiled(*w))
        for dtype, rows in ((torch.float32, None), (torch.bfloat16, row_scale)):
            want = reference.gemm(*a, *w, 0.013, rows, "exact", dtype)
            have = cuda.gemm_tiled(*there, n, 0.013, *to(device, rows), "exact", dtype)
            assert_same("y", have, want, m, n, k, dtype, of_a, of_w)


def check_exact_plans(device: str, shapes: list[tuple[int, int, int]], limits: driver.DeviceLimits) -> None:
    """Every launch that nvfp4_exact_wgmma.cu can be planned to, of tokens and of clusters."""
    for (m, n, k), spread in itertools.product(shapes, SPREADS):
        a, w = spread_matrix(spread, m, k), spread_matrix("even", n, k, seed=1)
        want = reference.gemm(*a, *w, 0.013, None, "exact", F32)
        codes, scales, tiled = to(device, *a, nvfp4_layout.to_tiled(*w))
        operands = products.padded_operands(codes, scales)
        for plan in exact_wgmma.candidates(m, n, k, limits):
            y = torch.full((m, n), float("nan"), device=device)
            exact_wgmma.multiply(*operands, tiled, 0.013, None, y, plan)
            assert_same("y", y, want, m, n, k, spread, plan)


def check_chained(
    device: str, shapes: list[tuple[int, int, int]], tiles: tuple[str | None, ...] = (None,)
) -> None:
    """`tc` against the exact sum, within what K / 16 additions may lose of the sum of magnitudes.

    An addition loses less than 2^-22 of the largest operand, truncation and a lost bit included; and rounding
    to bfloat16 2^-8 of the result.
    """
    for m, n, k in shapes:
        a, w = random_matrix(m, columns=k), random_matrix(n, columns=k, seed=1)
        dense = [reference.dequantize(*part, 1.0, None, F32).double() for part in (a, w)]
        exact = dense[0] @ dense[1].t()
        bound = (dense[0].abs() @ dense[1].abs().t()) * (k // 16 + 2) * 2.0**-22
        row_scale = torch.rand(m, generator=generator()) + 0.5
        for dtype, rows in ((F32, None), (torch.bfloat16, row_scale)):
            scale = 0.5 if rows is None else 0.5 * rows[:, None].double()
            for tile in tiles:
                y = cuda.gemm(*to(device, *a, *w), 0.5, *to(device, rows), "tc", dtype, tile).cpu().double()
                allowed = bound * scale + (exact * scale).abs() * (2.0**-8 if rows is not None else 2.0**-22)
                assert bool(((y - exact * scale).abs() <= allowed).all()), (m, n, k, dtype, tile)


# Rows of each expert, and of none.
ROUTINGS: tuple[tuple[list[int], int], ...] = (
    ([3, 0, 9, 1], 2),
    ([0, 0, 0, 20], 0),
    ([1] * 7 + [0] * 33, 3),
)


def check_moe(device: str, accum: str, n: int, k: int, tiles: tuple[str | None, ...]) -> None:
    """Any distribution, indirect rows, rows of no expert."""
    for counts, none in ROUTINGS:
        count, experts = sum(counts) + none, len(counts)
        bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        a, w = random_matrix(9, columns=k), random_matrix(experts, n, columns=k, seed=1)
        made = generator(count)
        w_scale, row_scale = torch.rand(experts, generator=made), torch.rand(9, generator=made)
        rows = torch.randint(0, 9, (count,), generator=made).int()
        args = (bounds, *w, w_scale)
        by_token, by_row = (*a, rows, *args, row_scale), (a[0][rows], a[1][rows], None, *args, None)
        for operands, dtype in ((by_token, F32), (by_row, torch.bfloat16)):
            want = reference.moe_gemm(*operands, accum, dtype)
            there = to(device, *operands)
            for tile in tiles:
                assert_same("y", cuda.moe_gemm(*there, accum, dtype, tile), want, accum, counts, tile)


def check_moe_tiles(
    device: str, n: int, k: int, routings: Iterable[tuple[list[int], int]], spreads: Iterable[str] = SPREADS
) -> None:
    """As `check_moe`, of experts in tiles, each after rows that its last tile of tokens may reach."""
    for (counts, none), spread in itertools.product(routings, spreads):
        count, experts = sum(counts) + none, len(counts)
        bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        a = spread_matrix(spread, 9, k)
        w = [
            torch.stack(part)
            for part in zip(*(spread_matrix(spread, n, k, i) for i in range(experts)), strict=True)
        ]
        made = generator(count)
        w_scale, row_scale = torch.rand(experts, generator=made), torch.rand(9, generator=made)
        rows = torch.randint(0, 9, (count,), generator=made).int()
        by_token, by_row = (*a, rows), (a[0][rows], a[1][rows], None)
        for operands, factors, dtype in ((by_token, row_scale, F32), (by_row, None, torch.bfloat16)):
            want = reference.moe_gemm(*operands, bounds, *w, w_scale, factors, "exact", dtype)
            there = to(device, *operands, bounds, nvfp4_layout.to_tiled(*w))
            # Which is exact here under `tc`, too.
            for accum, few_rows in (("exact", 0), ("exact", 10**9), ("tc", 10**9)):
                with mock.patch.object(moe, "FEW_ROWS", few_rows):
                    y = cuda.moe_gemm_tiled(*there, n, *to(device, w_scale, factors), accum, dtype)
                assert_same("y", y, want, counts, spread, accum, few_rows)


def check_moe_linear(device: str, n: int, k: int, routings: Iterable[tuple[list[int], int]]) -> None:
    """W4A16 of experts in tiles, within what rounding products' sums and results gives; float32, too."""
    for (counts, none), dtype in itertools.product(routings, DTYPES):
        count, experts = sum(counts) + none, len(counts)
        bounds = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
        w = [
            torch.stack(part)
            for part in zip(*(spread_matrix("even", n, k, i) for i in range(experts)), strict=True)
        ]
        w_scale = torch.rand(experts, generator=generator(count))
        x = normal(count, k, dtype=dtype, seed=count)
        there = to(device, x, bounds, nvfp4_layout.to_tiled(*w), w_scale)
        y = cuda.moe_linear_tiled(*there[:3], n, there[3]).cpu()
        assert y.dtype == dtype
        assert not bool(y[sum(counts) :].any())
        for expert, (begin, end) in enumerate(itertools.pairwise(bounds.tolist())):
            of_expert = w[0][expert], w[1][expert]
            dense = (
                reference.dequantize(*of_expert, 1.0, None, F32).double()[:, :k] * w_scale[expert].double()
            )
            rows, eps = x[begin:end].double(), torch.finfo(dtype).eps
            want = rows @ dense.t()
            bound = (rows.abs() @ dense.abs().t()) * (k * 2.0**-23 + eps) + want.abs() * eps
            assert bool(((y[begin:end].double() - want).abs() <= bound).all()), (counts, expert, dtype)


def check_largest_sum(device: str, columns: int) -> None:
    """The largest magnitudes there are, all of one sign: the exact sum does not overflow."""
    scales = torch.full((2, columns // 16), 0x7E, dtype=torch.uint8)
    a = (torch.full((2, columns // 2), 0x77, dtype=torch.uint8), scales)
    w = (torch.full((2, columns // 2), 0xFF, dtype=torch.uint8), scales)
    want = torch.full((2, 2), -columns * 2688.0**2, dtype=torch.float64).float()
    assert_same("y", cuda.gemm(*to(device, *a, *w), 1.0, None, "exact", F32), want, columns)
    tiles = nvfp4_layout.to_tiled(*w)
    assert_same("tiled", cuda.gemm_tiled(*to(device, *a, tiles), 2, 1.0, None, "exact", F32), want, columns)
