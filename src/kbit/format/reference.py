"""The format's definition as arithmetic: quantize with given scales, dequantize, in pure PyTorch.

Every backend is compared with this file bit for bit. All arithmetic is float32; the one operation that
must not be reordered or contracted is named where it stands.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.format import bitplanes
from kbit.format.codebook import BLOCK_SIZE, bits_of, nearest_code
from kbit.format.scales import absmax_format


def blocks_of(in_features: int) -> int:
    """Blocks per row: in_features / 32, rounded up."""
    return -(-in_features // BLOCK_SIZE)


def split_blocks(w: torch.Tensor) -> torch.Tensor:
    """[..., N, K] of any float dtype -> float32 [..., N, blocks, 32], zero-padded."""
    padding = -w.shape[-1] % BLOCK_SIZE
    return F.pad(w.float(), (0, padding)).unflatten(-1, (-1, BLOCK_SIZE))


def codes_for_scale(blocks: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Nearest codes of w / scale.

    Args:
        blocks: float32 [..., 32].
        scale: float32 [...], the decoded block scale times the matrix factor; 0 gives the code nearest 0.
        codebook: float32 [2^bits].

    Returns:
        uint8 [..., 32].
    """
    divisor = scale.unsqueeze(-1)
    normalized = torch.where(divisor > 0, blocks / divisor, torch.zeros_like(blocks))
    return nearest_code(normalized, codebook)


def block_error(
    blocks: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor, in_features: int
) -> torch.Tensor:
    """Squared error of a block, summed in the one order that every backend uses.

    Args:
        blocks: float32 [..., blocks, 32].
        codes: uint8 [..., blocks, 32].
        scale: float32 [..., blocks].
        codebook: float32 [2^bits].
        in_features: K; the padding behind counts nothing.

    Returns:
        float32 [..., blocks].
    """
    difference = blocks - codebook[codes.int()] * scale.unsqueeze(-1)
    total = difference * difference
    if in_features % BLOCK_SIZE:
        total[..., -1, in_features % BLOCK_SIZE :] = 0
    # Halving: i += i + 16, then 8, 4, 2, 1. It is a butterfly over lanes on SIMD and SIMT machines alike.
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total.squeeze(-1)


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Decode weights: round_T(codebook_T[code] * absmax * scale), the products in float32, left to right.

    Args:
        packed: int32 [..., N, blocks * bits].
        absmax: [..., N, blocks] in a format of `ABSMAX_FORMATS`.
        codebook: float32 [2^bits]; rounded to `dtype` first.
        scale: float32 [...], one factor per matrix.
        in_features: K.
        dtype: T, float32, float16 or bfloat16.

    Returns:
        [..., N, K] of `dtype`.
    """
    bits = bits_of(codebook)
    levels = codebook.to(dtype).float()
    block_scale = absmax_format(absmax.dtype).decode(absmax)
    codes = bitplanes.unpack(packed, bits).unflatten(-1, (-1, BLOCK_SIZE))
    values = levels[codes.int()] * block_scale.unsqueeze(-1) * scale[..., None, None, None]
    return values.flatten(-2)[..., :in_features].to(dtype)
