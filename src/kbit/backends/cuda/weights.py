"""Weights as the product kernels want them: aligned, and not written by the kernel right in front.

Product kernels are launched as dependents of the kernel in front of them on the stream (programmatic
dependent launch) and read weights before that one is done, so it must not be what writes the weight.
"""

from __future__ import annotations

import torch


def fenced(weight: torch.Tensor) -> torch.Tensor:
    """`weight`, written by the last kernel of the current stream, with a small kernel queued behind that one.

    The small kernel is no dependent: it starts once the weight is written, and it is all that a product which
    is launched next can overtake.
    """
    if weight.is_cuda:
        weight.new_zeros(1, dtype=torch.uint8)
    return weight


def aligned(tensor: torch.Tensor, multiple: int = 16) -> torch.Tensor:
    """`tensor`, contiguous and at an address that is a multiple of so many bytes; others are copied."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % multiple == 0 else tensor.clone()


def ready(part: torch.Tensor, multiple: int = 16) -> torch.Tensor:
    """A part of a weight for a product that is launched next: `aligned`, and fenced if that made a copy."""
    found = aligned(part, multiple)
    return found if found is part else fenced(found)
