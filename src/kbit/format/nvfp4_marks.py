"""What tiles of NVFP4 say of their weights, for csrc/nvfp4_exact_wgmma.cu, which adds up products in float32.

A block of weights that are not all 0 is a multiple of a unit, 2^(E - 11), E being its scale's exponent field,
at least 1. A row's unit is the smallest of its blocks'. By the inequality of Cauchy and Schwarz no sum of
products is larger than the product of both rows' norms, and in units it is an integer: so norms tell whether
float32 holds it.

A tile's mark has 16 bits, for the 64 rows of W around it that begin at a multiple of 64. Bits

 * 0 .. 5: B, where no row's squared norm in the tile's 64 columns reaches 2^B units squared;
 * 6 .. 11: the same for the 256 columns around that begin at a multiple of 256;
 * 12 .. 15: the largest E of all columns, 0 where all weights are 0.

Where columns have an E more than 8 below the largest, B is 63.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.format.codebook import E2M1_MAGNITUDES
from kbit.format.layout import TILE_COLUMNS, TILE_ROWS

BITS = 16
WIDE_COLUMNS = 256
_ROWS, _STEPS = 64, 4  # rows of a mark; blocks of 16 columns of a tile
_TILES = WIDE_COLUMNS // TILE_COLUMNS
_MOST_OCTAVES, _NO_BOUND = 8, 63
_NO_FIELD = 99
_ROUNDED = 1 + 2.0**-12  # for sums that were
_BYTES_AT_ONCE = 2**24  # of codes
_DOUBLED_SQUARES = [int(2 * magnitude) ** 2 for magnitude in E2M1_MAGNITUDES] * 2
# By a byte of two codes.
_SQUARES = tuple(float(low + high) for high in _DOUBLED_SQUARES for low in _DOUBLED_SQUARES)


def of_matrices(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The marks of matrices' tiles.

    Args:
        codes: uint8 [E, rows, columns / 2] of whole tiles, layout nv.
        scales: uint8 [E, rows, columns / 16], ue4m3 up to 0x7E.

    Returns:
        uint8 [E, rows / 16, columns / 64, 16], a mark's bits, the lowest first.
    """
    matrices, rows, width = codes.shape
    more = -rows % _ROWS
    all_rows = [(F.pad(part, (0, 0, 0, more)) if more else part).flatten(0, 1) for part in (codes, scales)]
    at_once = max(1, _BYTES_AT_ONCE // (_ROWS * max(1, width))) * _ROWS
    parts = [_of_rows(*part) for part in zip(*(part.split(at_once) for part in all_rows), strict=True)]
    each = torch.cat(parts).unflatten(0, (matrices, -1))
    return each.repeat_interleave(_ROWS // TILE_ROWS, dim=1)[:, : rows // TILE_ROWS]


def _of_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 [64 rows each, column tiles, 16]."""
    squares = torch.tensor(_SQUARES, dtype=torch.float32, device=codes.device)
    squares = squares.index_select(0, codes.flatten().int())
    field = (scales >> 3).clamp_(min=1).float()
    mantissa = torch.where(scales < 8, scales, scales & 7 | 8).float()
    blocks = squares.view(*scales.shape, -1).sum(-1) * mantissa * mantissa
    tiles = scales.shape[1] // _STEPS
    padding = (0, -tiles % _TILES * _STEPS)
    blocks, field = (F.pad(part, padding).unflatten(0, (-1, _ROWS)) for part in (blocks, field))
    known = field.masked_fill(blocks == 0, _NO_FIELD)  # [64 rows each, 64, blocks]
    largest = field.masked_fill(blocks == 0, 0).amax((1, 2))[:, None]
    small = known.amin(1).unflatten(1, (-1, _STEPS)).amin(-1) < largest - _MOST_OCTAVES
    narrow = _bound(blocks, field, known, _STEPS).masked_fill(small, _NO_BOUND)
    any_small = small.unflatten(1, (-1, _TILES)).any(-1)
    wide = _bound(blocks, field, known, _STEPS * _TILES).masked_fill(any_small, _NO_BOUND)
    wide = wide.repeat_interleave(_TILES, dim=1)
    mark = (narrow | wide << 6 | largest.int() << 12)[:, :tiles]
    return (mark[..., None] >> torch.arange(BITS, device=mark.device) & 1).to(torch.uint8)


def _bound(blocks: torch.Tensor, field: torch.Tensor, known: torch.Tensor, width: int) -> torch.Tensor:
    """B of every `width` blocks, int32 [64 rows each, widths]."""
    blocks, field, known = (part.unflatten(-1, (-1, width)) for part in (blocks, field, known))
    in_units = blocks * torch.exp2(2 * (field - known.amin(-1, keepdim=True)))
    return torch.frexp(in_units.sum(-1) * _ROUNDED).exponent.amax(1)
