"""Bit-planes: how the codes of a block of 32 become `bits` 32-bit words.

Word b * bits + j of a row holds, in bit i, bit j of the code of element i of block b. Words are int32,
not uint32, because torch's uint32 lacks shifts on the CPU and collectives in gloo.
"""

from __future__ import annotations

import torch

from kbit.format.codebook import BLOCK_SIZE


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes into bit-plane words.

    Args:
        codes: uint8 [..., 32 * blocks], each below 2^bits.
        bits: code width.

    Returns:
        int32 [..., blocks * bits].
    """
    blocks = codes.unflatten(-1, (-1, 1, BLOCK_SIZE)).to(torch.int64)
    planes = torch.arange(bits, device=codes.device).unsqueeze(-1)
    positions = torch.arange(BLOCK_SIZE, device=codes.device)
    words = (((blocks >> planes) & 1) << positions).sum(-1)
    return _low_word(words).flatten(-2)


def _low_word(words: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 `words` as int32, bit 31 becoming the sign."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack`.

    Args:
        packed: int32 [..., blocks * bits].
        bits: code width.

    Returns:
        uint8 [..., 32 * blocks].
    """
    words = packed.unflatten(-1, (-1, bits, 1))
    positions = torch.arange(BLOCK_SIZE, device=packed.device, dtype=torch.int32)
    codes = torch.zeros(*words.shape[:-2], BLOCK_SIZE, dtype=torch.uint8, device=packed.device)
    for plane in range(bits):
        # An arithmetic shift drags the sign along; the mask drops it again.
        codes |= (((words[..., plane, :] >> positions) & 1) << plane).to(torch.uint8)
    return codes.flatten(-2)
