"""Checks of ops that take many tensors, and write some of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def operands(
    op: str, expected: Mapping[str, tuple[torch.Tensor | None, torch.dtype, tuple[int, ...]]]
) -> None:
    """Check tensors that are given, and on the device of the first.

    Args:
        op: name for messages.
        expected: by their names: tensor or None, dtype, shape.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device.
    """
    first, (leading, _, _) = next(iter(expected.items()))
    for argument, (tensor, dtype, shape) in expected.items():
        if tensor is None or leading is None:
            continue
        if tensor.dtype != dtype:
            raise TypeError(f"{op}: {argument} must be {dtype}, got {tensor.dtype}. Cast it.")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{op}: {argument} must be {list(shape)}, got {list(tensor.shape)}.")
        if tensor.device != leading.device:
            raise ValueError(
                f"{op}: {argument} is on {tensor.device}, {first} on {leading.device}. Move one."
            )


def heads_of_keys(op: str, shared: int, heads: int) -> None:
    """Raise ValueError unless every head of keys is that of as many heads of query."""
    if not shared or heads % shared:
        raise ValueError(f"{op}: heads of keys must divide the {heads} of query, got {shared}.")


def written_in_place(op: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless tensors are contiguous."""
    for argument, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{op}: {argument} is written in place and must be contiguous.")


def one_length(op: str, length: torch.Tensor, name: str = "length") -> None:
    """Raise TypeError unless the length of a cache is one int64."""
    if length.dtype != torch.int64 or length.numel() != 1:
        raise TypeError(f"{op}: {name} must be one int64, got {length.numel()} of {length.dtype}.")
