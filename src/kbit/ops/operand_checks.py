"""Checks of ops that take many tensors, and of what they write."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kbit.format import type_checks
from kbit.format.words import at
from kbit.ops import grad_checks


def operands(
    op: str,
    device: torch.device,
    expected: Mapping[str, tuple[torch.Tensor | None, torch.dtype, tuple[int, ...]]],
) -> None:
    """Check tensors that are given.

    Args:
        op: name for messages.
        device: of the op's first tensor.
        expected: by their names: tensor or None, dtype, shape.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device.
    """
    for argument, (tensor, dtype, shape) in expected.items():
        if tensor is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {argument} must be {dtype}, got {tensor.dtype}. Cast it.")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{op}: {argument} must be {list(shape)}, got {list(tensor.shape)}.")
        if tensor.device != device:
            raise _elsewhere(op, argument, tensor, device)


def _elsewhere(op: str, argument: str, tensor: torch.Tensor, device: torch.device) -> ValueError:
    return ValueError(f"{op}: {argument} is on {tensor.device}, the op's first tensor on {device}. Move one.")


def heads_of_keys(op: str, shared: int, heads: int) -> None:
    """Raise ValueError unless every head of keys is that of as many heads of query."""
    if not shared or heads % shared:
        raise ValueError(f"{op}: heads of keys must divide the {heads} of query, got {shared}.")


def written_in_place(op: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless tensors are contiguous."""
    for argument, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {argument} is written in place and must be contiguous.")


def one_length(
    op: str, length: torch.Tensor, device: torch.device | None = None, name: str = "length"
) -> None:
    """Raise TypeError unless the length of a cache is one int64, and ValueError unless it is on `device`."""
    if length.dtype != torch.int64 or length.numel() != 1:
        raise TypeError(f"{op}: {name} must be one int64, got {length.numel()} of {length.dtype}.")
    if device is not None and length.device != device:
        raise _elsewhere(op, name, length, device)


def given_out(op: str, out: torch.Tensor | None, needs_grad: bool, where: str = "") -> None:
    """Check a caller's `out=` as far as an op cannot, before one is called; the rest is `checks.output`'s.

    Raises:
        TypeError: it is no dense tensor.
        ValueError: PyTorch negates or conjugates it to read it, or a gradient is wanted, of it or the inputs.
    """
    if out is None:
        return
    type_checks.tensor(op, "out", out, where)
    # PyTorch would give the op a copy, and fails to write that back. A tracer cannot ask.
    if not torch.compiler.is_compiling() and (out.is_neg() or out.is_conj()):
        raise ValueError(
            f"{op}: out must hold its values as they are, got a view that PyTorch negates or conjugates to "
            f"read it{at(where)}. Make it with torch.empty."
        )
    if needs_grad or grad_checks.wants_grad(out):
        raise ValueError(
            f"{op}: out= cannot be combined with gradients{at(where)}. Drop out=, or use torch.no_grad()."
        )
