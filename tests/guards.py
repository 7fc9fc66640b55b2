"""Tensors amid values that show whether something wrote or read beside them."""

from __future__ import annotations

import torch

GUARD = 64  # elements before and after


def guarded(value: torch.Tensor) -> torch.Tensor:
    """The values amid NaN, or amid -1."""
    nothing = float("nan") if value.is_floating_point() else -1
    around = torch.full((value.numel() + 2 * GUARD,), nothing, dtype=value.dtype)
    inside = around[GUARD:-GUARD].view(value.shape)
    return inside.copy_(value)


def untouched(inside: torch.Tensor) -> bool:
    """Whether what stands around `guarded` values is as it was."""
    around = torch.as_strided(inside, (inside.numel() + 2 * GUARD,), (1,), inside.storage_offset() - GUARD)
    edges = torch.cat([around[:GUARD], around[-GUARD:]])
    return bool(edges.isnan().all() if inside.is_floating_point() else (edges == -1).all())
