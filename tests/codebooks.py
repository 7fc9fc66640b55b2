"""Codebooks other than the default one."""

from __future__ import annotations

import torch


def asymmetric(bits: int) -> torch.Tensor:
    """Levels of both signs that are not symmetric around 0, on the CPU."""
    return (torch.linspace(-0.4, 1, 2**bits) + 0.013).clamp_max(1.0)
