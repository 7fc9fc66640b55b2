"""Counts, lists, places and errors in sentences."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def counted(count: int, noun: str) -> str:
    """A number and what it counts, such as "1 shard" or "2 shards"."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def first_of(names: Iterable[str], shown: int = 3) -> str:
    """The first few names in order, and how many there are besides."""
    found = sorted(names)
    more = f" and {len(found) - shown} more" if len(found) > shown else ""
    return ", ".join(found[:shown]) + more


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype without "torch." in front."""
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """What an error says first; its type where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def at(where: str) -> str:
    """The layer that a message is about, to follow what it got: " (layers.3.mlp)"; nothing if unknown."""
    return f" ({where})" if where else ""


def with_place(message: str, where: str) -> str:
    """A message that was made where the layer is not known, with it behind what it got."""
    first, end, rest = message.partition(". ")
    return f"{first}{at(where)}. {rest}" if end else f"{message.removesuffix('.')}{at(where)}."
