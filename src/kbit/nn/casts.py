"""Moves of modules that cast none of their quantized parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def without_casts(
    fn: Callable[[torch.Tensor], torch.Tensor], parts: Iterable[torch.Tensor | None]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`fn` for nn.Module._apply: moves `parts`, but never casts them. model.half() must not touch a scale.

    Nor does another memory format change the order in which kernels read them.
    """
    kept = {id(part) for part in parts}

    def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
        applied = fn(tensor)
        same = applied.dtype == tensor.dtype and applied.stride() == tensor.stride()
        return applied if same or id(tensor) not in kept else tensor.to(applied.device)

    return keep_dtype
