"""Block scale formats: how one number per block of 32 is stored, and the per-matrix factor beside it.

`ABSMAX_FORMATS` is the registry. Tests parametrise over it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kbit.format import e4m4
from kbit.format.words import at


@dataclass(frozen=True)
class AbsmaxFormat:
    """One way to store block scales: its dtype in a checkpoint and the range it represents well."""

    name: str
    dtype: torch.dtype
    min_normal: float
    max: float

    @property
    def bytes(self) -> int:
        """Bytes per block."""
        return self.dtype.itemsize

    def encode(self, scales: torch.Tensor) -> torch.Tensor:
        """float32 >= 0 -> the stored form, rounded to nearest even, saturating."""
        if self.dtype == torch.uint8:
            return e4m4.encode(scales)
        return scales.clamp_max(self.max).to(self.dtype)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """The stored form -> float32, exact."""
        return e4m4.decode(stored) if self.dtype == torch.uint8 else stored.float()

    def tensor_factor(self, absmax: torch.Tensor) -> torch.Tensor:
        """The power of two that brings the block scales of each matrix into this format's range.

        Args:
            absmax: float32 [..., N, blocks], >= 0.

        Returns:
            float32 [...]: 1 where every non-zero absmax is in range already, else 2^e with the smallest
            integer e, at least -126, for which the largest absmax divided by 2^e fits.
        """
        if absmax.numel() == 0:
            return absmax.new_ones(absmax.shape[:-2])
        flat = absmax.flatten(-2)
        largest = flat.amax(-1)
        smallest = torch.where(flat > 0, flat, torch.inf).amin(-1)
        fits = (largest <= self.max) & (smallest >= self.min_normal) | (largest == 0)
        mantissa, exponent = torch.frexp(largest)
        limit_mantissa, limit_exponent = math.frexp(self.max)
        power = (exponent - limit_exponent + (mantissa > limit_mantissa)).clamp(-126, 127)
        return torch.where(fits, torch.ones_like(largest), torch.ldexp(torch.ones_like(largest), power))


ABSMAX_FORMATS: dict[str, AbsmaxFormat] = {
    fmt.name: fmt
    for fmt in (
        AbsmaxFormat("e4m4", torch.uint8, e4m4.MIN_NORMAL, e4m4.MAX),
        AbsmaxFormat("float16", torch.float16, 2.0**-14, 65504.0),
        AbsmaxFormat("float32", torch.float32, 0.0, torch.finfo(torch.float32).max),
    )
}


def absmax_format(key: str | torch.dtype, where: str = "") -> AbsmaxFormat:
    """Look a format up by its name or by the dtype it is stored in.

    Args:
        key: name or dtype.
        where: the layer or function that it is for, for the message.

    Raises:
        ValueError: no such format.
    """
    for fmt in ABSMAX_FORMATS.values():
        if key in (fmt.name, fmt.dtype):
            return fmt
    raise ValueError(
        f"unknown absmax format {key!r}{at(where)}; known: {', '.join(sorted(ABSMAX_FORMATS))}. Give one of "
        f"these names."
    )
