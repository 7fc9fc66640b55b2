"""e2m1: the 4-bit float of NVFP4. code = sign << 3 | index of the magnitude."""

from __future__ import annotations

import torch

from kbit.format.codebook import E2M1_MAGNITUDES

MAX = 6.0
# A magnitude's index is the count of these that it exceeds: halfway values go toward zero.
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def midpoints(ties_even: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [7]: index of a magnitude m = count of m > midpoints.

    With ties_even, the midpoints whose even neighbour is the upper one are the next lower float32.
    """
    exact = torch.tensor(MIDPOINTS, dtype=torch.float32, device="cpu")
    if ties_even:
        exact[1::2] = torch.nextafter(exact[1::2], torch.zeros_like(exact[1::2]))
    return exact.to(device)


def magnitudes(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [8]: the magnitude of every index."""
    return torch.tensor(E2M1_MAGNITUDES, dtype=torch.float32, device=device)


def decode(codes: torch.Tensor) -> torch.Tensor:
    """Decode codes, exactly.

    Args:
        codes: uint8 0..15, any shape.

    Returns:
        float32, the same shape; code 8 is -0.
    """
    positive = magnitudes(codes.device)
    return torch.cat([positive, -positive])[codes.int()]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [..., 2n] -> bytes [..., n], element 2j in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The reverse of `pack`."""
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


# int64 [256] on the CPU: what each byte of `pack` decodes to, two float32 in the memory of one element. Made
# here and not at the first call, which may come in a mode where tensors hold nothing.
PAIRS = (
    decode(unpack(torch.arange(256, dtype=torch.uint8, device="cpu")[:, None])).view(torch.int64).flatten()
)
