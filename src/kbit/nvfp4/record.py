"""What a run leaves for comparison: every tensor that must not change by a bit, and how often a lever
acted."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from kbit.format.words import dtype_name


@dataclass(frozen=True)
class Difference:
    """The first place where two runs differ.

    Attributes:
        name: the tensor, with its step.
        index: the element; None where shapes differ.
        values: what both runs have there.
    """

    name: str
    index: tuple[int, ...] | None
    values: tuple[str, str]

    def __str__(self) -> str:
        place = "shapes" if self.index is None else f"element {list(self.index)}"
        return f"{self.name}, {place}: {self.values[0]} and {self.values[1]}"


class Recorder:
    """Collects tensors by name in the order of the run, and counts what levers did.

    Attributes:
        tensors: (name, contiguous CPU tensor); a name comes once per step.
        counts: what happened how often.
    """

    def __init__(self) -> None:
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.counts: Counter[str] = Counter()

    def add(self, name: str, *tensors: torch.Tensor) -> None:
        """Keep copies of tensors under one name."""
        self.tensors += [(name, tensor.detach().cpu().clone().contiguous()) for tensor in tensors]

    def count(self, name: str, amount: int = 1) -> None:
        """Count an event, or rows."""
        self.counts[name] += amount

    def digests(self) -> dict[str, str]:
        """SHA-256 of each name's bytes over all its tensors, in order of first appearance."""
        hashes: dict[str, Any] = {}
        for name, tensor in self.tensors:
            digest = hashes.setdefault(name, hashlib.sha256())
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(as_bytes(tensor).numpy().tobytes())
        return {name: digest.hexdigest() for name, digest in hashes.items()}

    def first_difference(self, other: Recorder) -> Difference | None:
        """Where the run of `other` leaves this one; None if every byte is equal."""
        seen: Counter[str] = Counter()
        for (name, mine), (other_name, theirs) in zip(self.tensors, other.tensors, strict=False):
            label = f"{name} #{seen[name]}"
            seen[name] += 1
            if name != other_name:
                return Difference(label, None, (name, other_name))
            found = _compare(label, mine, theirs)
            if found is not None:
                return found
        if len(self.tensors) != len(other.tensors):
            return Difference("end of the run", None, (str(len(self.tensors)), str(len(other.tensors))))
        return None


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, uint8 [numel * itemsize]."""
    return tensor.reshape(-1).view(torch.uint8)


def _compare(label: str, mine: torch.Tensor, theirs: torch.Tensor) -> Difference | None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        shapes = tuple(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (mine, theirs))
        return Difference(label, None, (shapes[0], shapes[1]))
    # Bytes, so that NaN equals itself and -0 differs from 0.
    places = (as_bytes(mine) != as_bytes(theirs)).nonzero()
    if not len(places):
        return None
    flat = int(places[0]) // mine.element_size()
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(flat), mine.shape))
    return Difference(label, index, (str(mine[index].item()), str(theirs[index].item())))
