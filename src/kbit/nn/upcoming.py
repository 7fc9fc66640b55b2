"""What comes after the part of a decoder layer that is being computed: a residual sum, and the norm of it.

Where layers are split over ranks, such a part ends with a sum over these, and one kernel can make all three.
The layer says here what it will do; who sums up does it ahead; and the norm finds it made when it is asked.
Nothing relies on that: a part that ends with something else has its sum as always.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

MADE = "_kbit_made"  # of a norm: what was made ahead for it


class Made(NamedTuple):
    """What was made of a residual and a sum, with the versions that both had."""

    residual: torch.Tensor
    summed: torch.Tensor
    versions: tuple[int, int]
    total: torch.Tensor
    normed: torch.Tensor

    def is_of(self, residual: torch.Tensor, added: torch.Tensor) -> bool:
        """Whether it is what is wanted of two tensors of one shape, or a view of the sum."""
        if residual is not self.residual or added.data_ptr() != self.summed.data_ptr():
            return False
        return added.is_contiguous() and self.versions == (residual._version, added._version)


class Following(NamedTuple):
    """A residual that something will be added to, and the norm of that: a `FusedNorm`."""

    residual: torch.Tensor
    norm: Any

    def set_made(self, summed: torch.Tensor, total: torch.Tensor, normed: torch.Tensor) -> None:
        """What is added is `summed`, maybe; then these are the others."""
        versions = self.residual._version, summed._version
        vars(self.norm)[MADE] = Made(self.residual, summed, versions, total, normed)


class _Now(threading.local):
    following: Following | None = None


_now = _Now()


@contextlib.contextmanager
def following(residual: torch.Tensor, norm: Any) -> Iterator[None]:
    """What this thread computes meanwhile will be added to a residual, and that normed."""
    before, _now.following = _now.following, Following(residual, norm)
    try:
        yield
    finally:
        _now.following = before


def norm_of_sum(x: torch.Tensor) -> Following | None:
    """What follows a sum like x, [..., D], if it can be made ahead by kernels."""
    found = _now.following
    if found is None or x.is_inference() or found.residual.is_inference():
        return None
    residual = found.residual
    alike = residual.shape[-1] == x.shape[-1] and residual.numel() == x.numel()
    return found if alike and residual.dtype == x.dtype and found.norm.takes(residual) else None
