"""How a block's scale is chosen: its largest magnitude, rounded to the scale format, or a better one nearby.

The plain quantizer takes the rounded absmax. The default one also tries the scales around it and keeps the
one with least squared error. A block's largest weight is an outlier of its own block. With few levels a
smaller scale, which clips it, serves the other 31 better. With many, the outermost levels are far apart (0.78
and 1.0 at 5 bits) and a larger scale, which leaves the last one unused, puts the dense levels where the
weights are.
"""

from __future__ import annotations

import torch

from kbit.format import bitplanes, reference
from kbit.format.codebook import bits_of
from kbit.format.scales import AbsmaxFormat

# First and last offset tried per width, in E4M4 codes (1/16 of an octave) from the rounded absmax. On the
# projections of a small MoE language model the squared error is this fraction of plain absmax's, in
# brackets that of a window of -6..1 for every width: 0.58 (0.69), 0.81 (0.82), 0.82 (0.84), 0.64 (0.82).
# Wider windows gain less than 1% more.
WINDOWS: dict[int, tuple[int, int]] = {2: (-14, 0), 3: (-8, 2), 4: (-5, 8), 5: (-4, 10)}


def _candidate(
    stored: torch.Tensor, offset: int, fmt: AbsmaxFormat, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The stored scale `offset` steps away, what it decodes to, and where it is a legal candidate."""
    if fmt.dtype == torch.uint8:
        moved = stored.to(torch.int16) + offset
        legal = (stored > 0) & (moved >= 1) & (moved <= 255)
        moved = moved.clamp(0, 255).to(torch.uint8)
    else:
        moved = fmt.encode(fmt.decode(stored) * 2.0 ** (offset / 16))
        legal = (stored > 0) & (moved > 0)
    return moved, fmt.decode(moved) * factor[..., None, None], legal


def quantize_blocks(
    blocks: torch.Tensor,
    codebook: torch.Tensor,
    fmt: AbsmaxFormat,
    factor: torch.Tensor,
    in_features: int,
    search: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with the rounded absmax as scale, or with the best scale of a small window around it.

    Candidates are tried in ascending order after the plain one and win only if strictly better, so that
    search is never worse in squared error.

    Args:
        blocks: float32 [..., N, blocks, 32].
        codebook: float32 [2^bits].
        fmt: how scales are stored.
        factor: float32 [...], one power of two per matrix.
        in_features: K, behind which the last block is padding.
        search: try the window, too.

    Returns:
        packed int32 [..., N, blocks * bits] and absmax [..., N, blocks] in `fmt.dtype`.
    """
    bits, per_row = bits_of(codebook), factor[..., None, None]
    plain = fmt.encode(blocks.abs().amax(-1) / per_row)
    scale = fmt.decode(plain) * per_row
    codes = reference.codes_for_scale(blocks, scale, codebook)
    if not search:
        return bitplanes.pack(codes.flatten(-2), bits), plain
    best = plain
    error = reference.block_error(blocks, codes, scale, codebook, in_features)
    first, last = WINDOWS[bits]
    for offset in range(first, last + 1):
        if offset == 0:
            continue
        stored, scale, legal = _candidate(plain, offset, fmt, factor)
        new_codes = reference.codes_for_scale(blocks, scale, codebook)
        new_error = reference.block_error(blocks, new_codes, scale, codebook, in_features)
        better = legal & (new_error < error)
        best = torch.where(better, stored, best)
        error = torch.where(better, new_error, error)
        codes = torch.where(better.unsqueeze(-1), new_codes, codes)
    return bitplanes.pack(codes.flatten(-2), bits), best
