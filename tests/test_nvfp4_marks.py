"""The marks of NVFP4's tiles: float32 holds every sum of products that bounds allow to be chained."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

import nvfp4_cuda_cases as cases
from kbit.format import nvfp4_layout, nvfp4_marks
from kbit.nvfp4 import reference

CHAINED = 48  # kMostNorms of csrc/nvfp4_exact_wgmma.cuh
NARROW, WIDE = 64, 256


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [rows, columns]."""
    return reference.dequantize(codes, scales, 1.0, None, torch.float32).double()


def units(codes: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """float64 [rows, columns / width]: the unit of a row's blocks that are not all 0, 1 without any."""
    unit = torch.exp2((scales & 0x7F).div(8, rounding_mode="floor").clamp(min=1).double() - 11)
    blocks = values(codes, scales).unflatten(1, (-1, 16)).abs().amax(-1)
    least = unit.masked_fill(blocks == 0, torch.inf).unflatten(1, (-1, width // 16)).amin(-1)
    return least.masked_fill(least.isinf(), 1)


def bounds(codes: torch.Tensor, scales: torch.Tensor, width: int) -> torch.Tensor:
    """B of every row, int [rows, columns / width], by its definition."""
    norms = values(codes, scales).square().unflatten(1, (-1, width)).sum(-1)
    squares = norms / units(codes, scales, width) ** 2
    return torch.where(squares > 0, squares.log2().floor() + 1, 0).int()


def read_marks(tiled: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """B of 64 and of 256 columns and the largest E, int [row tiles, column tiles]."""
    bits = (tiled[..., 512:528] >> 7).int()
    mark = (bits << torch.arange(nvfp4_marks.BITS)).sum(-1)
    return mark & 63, mark >> 6 & 63, mark >> 12


def test_marks_say_what_they_are_said_to() -> None:
    """Ragged rows and columns; rows of zeros; a block of zeros whose scale counts for nothing."""
    codes, scales = cases.spread_matrix("steep", 150, 592)
    codes[:70], scales[3, 4] = 0, 0x7E
    codes[80, :8], scales[80, 0] = 0, 0x01
    narrow, wide, largest = read_marks(nvfp4_layout.to_tiled(codes, scales))
    more = torch.nn.functional.pad
    codes, scales = more(codes, (0, 88, 0, 42)), more(scales, (0, 11, 0, 42))
    for have, width in ((narrow, NARROW), (wide, WIDE)):
        want = bounds(codes, scales, width).unflatten(0, (-1, 64)).amax(1)
        want = want.repeat_interleave(4, 0).repeat_interleave(width // 64, 1)
        assert torch.equal(have, want[: have.shape[0], : have.shape[1]])
    assert narrow[:4].eq(0).all()
    fields = (scales >> 3).masked_fill(codes.unflatten(1, (-1, 8)).eq(0).all(-1), 0).unflatten(0, (-1, 64))
    assert torch.equal(largest[::4, 0], fields.amax((1, 2)).int())


def test_a_scale_far_below_the_largest_has_no_bound() -> None:
    codes = torch.full((64, 256), 0x11, dtype=torch.uint8)
    scales = torch.full((64, 32), 0x50, dtype=torch.uint8)  # E = 10
    scales[5, 6], scales[9, 21] = 0x10, 0x0F  # E = 2; E = 1, in the sixth tile
    narrow, wide, largest = read_marks(nvfp4_layout.to_tiled(codes, scales))
    assert narrow[0].eq(63).tolist() == [column == 5 for column in range(8)]
    assert wide[0].eq(63).tolist() == [column >= 4 for column in range(8)]
    assert largest.eq(10).all()


def test_many_rows_are_looked_at_in_parts(monkeypatch) -> None:
    codes, scales = cases.spread_matrix("any", 208, 320)
    whole = nvfp4_layout.to_tiled(codes, scales)
    monkeypatch.setattr(nvfp4_marks, "_BYTES_AT_ONCE", 1)
    assert torch.equal(nvfp4_layout.to_tiled(codes, scales), whole)


@given(st.sampled_from(cases.SPREADS), st.sampled_from(cases.SPREADS), st.integers(0, 10**6))
def test_float32_holds_the_sums_that_bounds_allow(of_a: str, of_w: str, seed: int) -> None:
    """Of random signs, and of products that are all positive; partial ones, too."""
    a, w = cases.spread_matrix(of_a, 8, WIDE, seed), cases.spread_matrix(of_w, 8, WIDE, seed + 1)
    if seed % 2:
        a, w = (a[0] & 0x77, a[1]), (w[0] & 0x77, w[1])
    for width in (NARROW, WIDE):
        both = bounds(*a, width)[:, None] + bounds(*w, width)
        products = (values(*a)[:, None] * values(*w)).unflatten(-1, (-1, width))
        in_units = products / (units(*a, width)[:, None] * units(*w, width))[..., None]
        partial = in_units.cumsum(-1)
        assert torch.equal(partial, partial.round())
        assert (partial.abs().amax(-1) <= 2.0**24)[both <= CHAINED].all()
