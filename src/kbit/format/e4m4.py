"""E4M4: the one-byte block scale. Four exponent bits, four mantissa bits, bias 11, no sign, no NaN.

byte = e * 16 + m.  e > 0: 2^(e - 11) * (1 + m / 16).  e = 0: 2^-10 * m / 16.  Range 0 to 31.
"""

from __future__ import annotations

import torch

MAX = 31.0
MIN_NORMAL = 2.0**-10
_BIAS = 11


def decode(byte: torch.Tensor) -> torch.Tensor:
    """Decode E4M4 bytes, exactly.

    Args:
        byte: uint8, any shape.

    Returns:
        float32, the same shape.
    """
    # byte << 6 read as an IEEE half is the value divided by 16, subnormals included.
    half = (byte.to(torch.int16) << 6).view(torch.float16)
    return half.float() * 16.0


def encode(values: torch.Tensor) -> torch.Tensor:
    """Encode non-negative numbers by round-to-nearest-even over all 256 values, saturating at 31.

    Args:
        values: float32, any shape, >= 0 (NaN is not allowed; the quantizers reject it earlier).

    Returns:
        uint8, the same shape.
    """
    clamped = values.float().clamp(0.0, MAX)
    # Steps are uniform inside a binade, so rounding happens on an integer grid: value / step, where
    # step = 2^(e - 15), e >= 1. The carry into the next exponent falls out of adding instead of or-ing.
    exponent = torch.frexp(clamped.clamp_min(MIN_NORMAL)).exponent - 1 + _BIAS
    step_count = torch.ldexp(clamped, 15 - exponent)
    return (torch.round(step_count).to(torch.int32) + 16 * (exponent - 1)).to(torch.uint8)


def table() -> torch.Tensor:
    """float32 [256]: the value of every byte, ascending."""
    return decode(torch.arange(256, dtype=torch.int32).to(torch.uint8))
