"""The plain quantizer: a block's scale is its largest magnitude, rounded to the scale format."""

from __future__ import annotations

import torch

from kbit.format import bitplanes, reference
from kbit.format.codebook import bits_of
from kbit.format.scales import AbsmaxFormat


def encode_absmax(
    blocks: torch.Tensor, fmt: AbsmaxFormat, factor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round each block's largest magnitude to the scale format.

    Args:
        blocks: float32 [..., N, blocks, 32].
        fmt: how scales are stored.
        factor: float32 [...], one power of two per matrix.

    Returns:
        stored [..., N, blocks] in `fmt.dtype`, and the scale it decodes to, float32, factor included.
    """
    per_row = factor[..., None, None]
    stored = fmt.encode(blocks.abs().amax(-1) / per_row)
    return stored, fmt.decode(stored) * per_row


def quantize_blocks(
    blocks: torch.Tensor, codebook: torch.Tensor, fmt: AbsmaxFormat, factor: torch.Tensor, in_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize with the rounded absmax as scale.

    Args:
        blocks: float32 [..., N, blocks, 32].
        codebook: float32 [2^bits].
        fmt: how scales are stored.
        factor: float32 [...].
        in_features: K, behind which the last block is padding.

    Returns:
        packed int32 [..., N, blocks * bits] and absmax [..., N, blocks].
    """
    stored, scale = encode_absmax(blocks, fmt, factor)
    codes = reference.codes_for_scale(blocks, scale, codebook)
    return bitplanes.pack(codes.flatten(-2), bits_of(codebook)), stored
