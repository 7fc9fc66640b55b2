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
    blocks = codes.unflatten(-1, (-1, BLOCK_SIZE))
    positions = torch.arange(BLOCK_SIZE, device=codes.device, dtype=torch.int32)
    # Plane by plane, for int32 takes four times the codes' memory. Bit 31 becomes the sign.
    planes = [
        (((blocks >> plane) & 1).to(torch.int32) << positions).sum(-1, dtype=torch.int32)
        for plane in range(bits)
    ]
    return torch.stack(planes, dim=-1).flatten(-2)


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
