"""What a run leaves for comparison: every tensor that must not change by a bit, and what the kernels did."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kbit.format.words import dtype_name
from kbit.nvfp4.kernels import Kernels

# Kernels that are counted by their calls.
_CALLS = {
    "rmsnorm": "norms",
    "rmsnorm_quantize": "folded norms",
    "silu_mul": "activations",
    "silu_mul_quantize": "folded activations",
}
_QUANTIZERS = ("quantize", "quantize_rows", "quantize_scatter")
_PRODUCTS = ("gemm", "moe_gemm", "gemm_tiled", "moe_gemm_tiled")


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
    """Collects tensors by name in the order of the run, and counts what kernels did.

    Attributes:
        part: what runs now; names of tensors begin with it.
        tensors: (name, contiguous CPU tensor); a name comes once per step.
        counts: what happened how often; see `counting`.
    """

    def __init__(self) -> None:
        self.part = ""
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.counts: Counter[str] = Counter()

    def add(self, name: str, *tensors: torch.Tensor) -> None:
        """Keep copies of tensors under one name."""
        name = f"{self.part}.{name}" if self.part else name
        self.tensors += [(name, tensor.detach().cpu().clone().contiguous()) for tensor in tensors]

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


@contextmanager
def counting(kernels: Kernels, counts: Counter[str]) -> Iterator[None]:
    """Count what a device's kernels are asked for, while the block runs.

    The calls themselves are counted, those that one kernel makes to another through `kernels` too, so no
    caller can report a lever that it did not pull. What a kernel does inside is not seen.

    Args:
        kernels: what `kernels_for` gives; its functions are replaced until the block ends.
        counts: calls of norms and activations, folded or not; rows quantized (outside folds), gathered and
            scattered; products by row number, with weights in tiles, and with each forced tile.
    """
    names = (*_CALLS, *_QUANTIZERS, *_PRODUCTS, "gather_rows")
    functions = {name: getattr(kernels, name) for name in names}
    for name, function in functions.items():
        setattr(kernels, name, _counted(name, function, counts))
    try:
        yield
    finally:
        for name, function in functions.items():
            setattr(kernels, name, function)


def _counted(name: str, function: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    signature = inspect.signature(getattr(Kernels, name))

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        # None for the protocol's self: kernels are functions of a module.
        counts.update(_events(name, signature.bind(None, *arguments, **named).arguments))
        return function(*arguments, **named)

    return call


def _events(name: str, given: dict[str, Any]) -> dict[str, int]:
    """What one call of a kernel counts as, from its arguments by name."""
    if name in _CALLS:
        return {_CALLS[name]: 1}
    if name == "gather_rows":
        return {"rows gathered": len(given["rows"])}
    if name in _QUANTIZERS:
        stored = {"rows scattered": given["slots"].numel()} if "slots" in given else {}
        return {"rows quantized": len(given["x"]), **stored}
    tile = given.get("tile")
    kinds = {
        "products by row number": given.get("rows") is not None,
        "products with weights in tiles": name.endswith("_tiled"),
        f"products with tile {tile}": tile is not None,
    }
    return {kind: 1 for kind, counts in kinds.items() if counts}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's bytes, uint8 [numel * itemsize]."""
    return tensor.reshape(-1).view(torch.uint8)


def _compare(label: str, mine: torch.Tensor, theirs: torch.Tensor) -> Difference | None:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        shapes = tuple(f"{dtype_name(t.dtype)}{list(t.shape)}" for t in (mine, theirs))
        return Difference(label, None, (shapes[0], shapes[1]))
    # Bytes, so that NaN equals itself and -0 differs from 0.
    bytes_of_mine, bytes_of_theirs = as_bytes(mine), as_bytes(theirs)
    if torch.equal(bytes_of_mine, bytes_of_theirs):
        return None
    flat = int((bytes_of_mine != bytes_of_theirs).nonzero()[0]) // mine.element_size()
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(flat), mine.shape))
    return Difference(label, index, (str(mine[index].item()), str(theirs[index].item())))
