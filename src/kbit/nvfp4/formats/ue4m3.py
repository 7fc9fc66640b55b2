"""ue4m3: the one-byte scale of NVFP4. Four exponent bits, three mantissa bits, bias 7, no sign.

byte = e * 8 + m.  e > 0: 2^(e - 7) * (1 + m / 8).  e = 0: 2^-9 * m.  Range 0 to 448 (0x7E); 0x7F, a NaN in
float8_e4m3fn, decodes to 0 as it does in ggml; bit 7 is ignored by `decode` and refused by the readers.
"""

from __future__ import annotations

import torch

MAX = 448.0
MAX_BYTE = 0x7E
MIN_NORMAL = 2.0**-6
_BIAS = 7


def encode(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even over all bytes, saturating at 448.

    Args:
        values: float32, any shape. What is not above 0, NaN included, becomes 0.

    Returns:
        uint8 0..0x7E, the same shape.
    """
    clamped = torch.where(values > 0, values, 0.0).clamp_max(MAX)
    # Steps are uniform inside a binade: value / step with step = 2^(e - 10), e >= 1. The carry into the next
    # exponent falls out of adding instead of or-ing.
    exponent = torch.frexp(clamped.clamp_min(MIN_NORMAL)).exponent - 1 + _BIAS
    steps = torch.ldexp(clamped, 10 - exponent)
    return (torch.round(steps).to(torch.int32) + 8 * (exponent - 1)).to(torch.uint8)


def table(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [128]: the value of every byte; all but the last ascend."""
    byte = torch.arange(128, device="cpu")
    exponent, mantissa = byte >> 3, byte & 7
    normal = torch.ldexp((8 + mantissa).float(), exponent - 10)
    values = torch.where(exponent == 0, mantissa.float() * 2.0**-9, normal)
    values[0x7F] = 0.0
    return values.to(device)


def decode(byte: torch.Tensor) -> torch.Tensor:
    """Decode bytes, exactly.

    Args:
        byte: uint8, any shape.

    Returns:
        float32, the same shape.
    """
    values = _EVERY_BYTE.to(byte.device)
    return values.index_select(0, byte.reshape(-1).int()).view(byte.shape)


_EVERY_BYTE = torch.cat([table("cpu"), table("cpu")])
