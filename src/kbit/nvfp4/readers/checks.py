"""Checks of what a file claims to be NVFP4, before any kernel sees it."""

from __future__ import annotations

import torch

from kbit.nvfp4.quantize import is_normal


def check_scale_bytes(scales: torch.Tensor, where: str) -> None:
    """Scales are unsigned: bit 7 must be 0, and so is NaN's byte refused.

    Raises:
        ValueError: some scale is negative or NaN.
    """
    bad = int((scales >= 0x7F).sum())
    if bad:
        raise ValueError(
            f"{where}: {bad} block scales are negative or NaN; ue4m3 ends at byte 0x7E (448). The file is "
            f"damaged or not NVFP4; fetch it again."
        )


def check_global_scale(value: float, where: str) -> float:
    """A tensor's factor must be a positive normal float32.

    Raises:
        ValueError: it is not.
    """
    if not is_normal(value):
        raise ValueError(
            f"{where}: a tensor's scale must be a positive normal float32, got {value}. The file is damaged; "
            f"fetch it again."
        )
    return value
