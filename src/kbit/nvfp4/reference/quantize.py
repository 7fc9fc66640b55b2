"""The activation quantizer in PyTorch; `kbit.nvfp4.kernels.Kernels` states what it computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kbit.nvfp4.exact import fma
from kbit.nvfp4.formats import e2m1, layouts, ue4m3

OFFSETS = (0, -1, 1, -2, 2)
# Blocks at a time: float64 temporaries of the 5 candidates then take 320 KB each and stay in the cache.
_CHUNK = 1 << 13
# Elements decoded at a time, 1 MB in float32. A whole weight at once took 7 times as long, most of it to get
# and give back the memory of float32 copies.
_DECODED = 1 << 18


def _row_scale(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    largest = torch.tensor(ue4m3.MAX * e2m1.MAX, dtype=torch.float32, device="cpu")
    factor = torch.tensor(global_scale, dtype=torch.float32, device="cpu")
    scale = x.abs().amax(dim=-1).float() / factor / largest
    limits = torch.finfo(torch.float32)
    return torch.where((scale >= limits.tiny) & (scale <= limits.max), scale, 1.0)


def quantize(
    x: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.quantize`."""
    return _quantize(_scaled(x, global_scale), search, ties_even)


def quantize_rows(
    x: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Kernels.quantize_rows`."""
    factors = _row_scale(x, global_scale)
    return *_quantize(_scaled(x, global_scale) / factors[:, None], search, ties_even), factors


def _scaled(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    # By a tensor, not a number: CUDA divides by a number through its reciprocal.
    return x.float() / torch.tensor(global_scale, dtype=torch.float32, device=x.device)


def _quantize(values: torch.Tensor, search: bool, ties_even: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [M, K] -> packed codes and scales, as `Kernels.quantize`."""
    rows, columns = values.shape
    groups = layouts.round_up(columns) // layouts.SUB_BLOCK
    blocks = F.pad(values, (0, groups * layouts.SUB_BLOCK - columns)).reshape(-1, layouts.SUB_BLOCK)
    codes = torch.empty(blocks.shape, dtype=torch.uint8, device=values.device)
    scales = torch.empty(len(blocks), dtype=torch.uint8, device=values.device)
    for start in range(0, len(blocks), _CHUNK):
        part = slice(start, start + _CHUNK)
        codes[part], scales[part] = _quantize_blocks(blocks[part], search, ties_even)
    packed = e2m1.pack(codes).view(rows, groups * layouts.SUB_BLOCK // 2)
    return packed, scales.view(rows, groups)


def _quantize_blocks(
    blocks: torch.Tensor, search: bool, ties_even: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [B, 16] -> codes uint8 [B, 16], scale bytes uint8 [B]."""
    finite = torch.isfinite(blocks).all(dim=1)
    blocks = torch.where(finite[:, None], blocks, 0.0)
    magnitude = blocks.abs()
    plain = ue4m3.encode(magnitude.amax(dim=1) / torch.full_like(magnitude[:, 0], e2m1.MAX)).int()
    midpoints = e2m1.midpoints(ties_even, blocks.device)
    chosen = _search(magnitude, plain, midpoints) if search else plain
    scale = ue4m3.table(blocks.device)[chosen]
    index = torch.bucketize(magnitude * _inverse(scale)[:, None], midpoints, out_int32=True)
    codes = (index + 8 * (blocks < 0)).to(torch.uint8)
    return codes, chosen.to(torch.uint8)


def _search(magnitude: torch.Tensor, plain: torch.Tensor, midpoints: torch.Tensor) -> torch.Tensor:
    """The candidate of least squared error for each block; the first of equals in the order of OFFSETS."""
    levels = e2m1.magnitudes(magnitude.device)
    candidates = torch.stack([plain + offset for offset in OFFSETS])
    legal = (candidates >= 0) & (candidates <= ue4m3.MAX_BYTE)
    scale = ue4m3.table(magnitude.device)[candidates.clamp(0, ue4m3.MAX_BYTE)]
    inverse = _inverse(scale)
    error = torch.zeros_like(scale)
    for column in magnitude.unbind(1):
        index = torch.bucketize(column * inverse, midpoints, out_int32=True)
        distance = column - levels[index] * scale
        error = fma(distance, distance, error)
    best, chosen = error[0], plain
    for candidate, each, allowed in zip(candidates[1:], error[1:], legal[1:], strict=True):
        better = allowed & (each < best)
        best, chosen = torch.where(better, each, best), torch.where(better, candidate, chosen)
    return chosen


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, torch.ones_like(scale) / scale, 0.0)


def repack(codes: torch.Tensor, scales: torch.Tensor, layout: str) -> torch.Tensor:
    """See `Kernels.repack`."""
    return layouts.from_nv(codes, scales, layout)


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """magnitude * scale, exact: float32 [..., K16]."""
    # By the byte, not by the element: half as many indices, and no copy of the codes apart.
    elements = e2m1.PAIRS.index_select(0, codes.reshape(-1).int()).view(torch.float32)
    elements = elements.view(*scales.shape, layouts.SUB_BLOCK)
    return elements.mul_(ue4m3.decode(scales)[..., None]).flatten(-2)


def row_chunks(rows: int, columns: int, times: int = 1) -> Iterator[slice]:
    """Slices of rows of a weight: what is decoded of so few, or of `times` as many, stays in the cache."""
    step = max(1, times * _DECODED // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, start + step)


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float,
    row_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `Kernels.dequantize`."""
    rows, columns = len(codes), 2 * codes.shape[1]
    factor = torch.tensor(global_scale, dtype=torch.float32, device="cpu")
    result = torch.empty(rows, columns, dtype=dtype, device="cpu")
    for part in row_chunks(rows, columns):
        values = decode(codes[part], scales[part]).mul_(factor)
        result[part] = values if row_scale is None else values.mul_(row_scale[part, None])
    return result
