"""The ops on tiled weights in pure PyTorch, on any device: a few row tiles at a time are made canonical.

It is what other backends' tiled kernels are tested against, and what runs where there are none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kbit.backends.reference import moe, products
from kbit.format import reference as fmt
from kbit.format.codebook import bits_of
from kbit.format.layout import TILE_ROWS, from_tiled
from kbit.ops import moe_schemas


def _chunks(
    tiled: torch.Tensor, bits: int, begin: int, end: int, in_features: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Canonical form of rows begin to end of one matrix, piece by piece: (rows, packed, absmax)."""
    rows = products.rows_at_once(in_features)
    for first in range(begin // TILE_ROWS * TILE_ROWS, end, rows):
        last = min(first + rows, end)
        tiles = tiled[first // TILE_ROWS : -(-last // TILE_ROWS)]
        packed, absmax = from_tiled(tiles, bits, last - first, in_features)
        skipped = max(0, begin - first)
        yield slice(first + skipped, last), packed[skipped:], absmax[skipped:]


def dequantize_tiled(
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    row_begin: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Rows from row_begin on into out [..., rows, K]."""
    if tiled.dim() == 4:
        for expert in range(tiled.shape[0]):
            dequantize_tiled(tiled[expert], codebook, scale[expert], bits, row_begin, out[expert])
        return out
    rows, k = out.shape
    for part, packed, absmax in _chunks(tiled, bits, row_begin, row_begin + rows, k):
        place = slice(part.start - row_begin, part.stop - row_begin)
        out[place] = fmt.dequantize(packed, absmax, codebook, scale, k, out.dtype)
    return out


def linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::linear_tiled` into `out` [M, N], or [M, N / 2] with silu_and_mul; x is [M, K]."""
    y = x.new_empty((x.shape[0], out_features)) if silu_and_mul else out
    bits = bits_of(codebook)
    for part, packed, absmax in _chunks(tiled, bits, 0, out_features, in_features):
        w = fmt.dequantize(packed, absmax, codebook, scale, in_features, x.dtype)
        y[:, part] = products.matmul(x, w, None if bias is None else bias[part])
    if silu_and_mul:
        gate, up = y.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)
    return out


def grouped_linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    source: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::grouped_linear_tiled` into `out` [T, N or N / 2]. Reads the offsets on the host."""
    out.zero_()
    if source is not None:
        x = x[source.long()]
    sizes = (out_features, in_features, silu_and_mul)
    for expert, rows in products.groups(expert_offsets):
        linear_tiled(x[rows], tiled[expert], codebook, scale[expert], None, *sizes, out[rows])
    return out


def experts_tiled(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    codebook: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    intermediate: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::experts_tiled` into `out` [T, H]. Reads how many rows experts have on the host."""
    source, bounds, inverse = moe_schemas.empty_routing(ids, gate_up.shape[0])
    moe.moe_align(ids, source, bounds, inverse)
    rows, results = (x.new_empty((len(source), columns)) for columns in (intermediate, x.shape[1]))
    first, second = (gate_up, codebook, gate_up_scale, bounds), (down, codebook, down_scale, bounds)
    grouped_linear_tiled(x, *first, 2 * intermediate, x.shape[1], True, source, rows)
    grouped_linear_tiled(rows, *second, x.shape[1], intermediate, False, None, results)
    moe.moe_combine(results, inverse, weights, bounds, out)
    return out
