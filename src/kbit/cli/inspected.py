"""What `kbit inspect` counts: modules of a folder, sums of them, and what is large and unquantized."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kbit.format.safetensors_header import TensorInfo


@dataclass
class Module:
    """One module of a checkpoint: a linear layer, a table, or all experts of a layer together.

    Attributes:
        bits: code width; None where it is not quantized.
        format: "k-bit" or "nvfp4"; None where it is not quantized.
        weights: number of weights, those of padded rows counted where K is not known otherwise.
        bytes: stored bytes, scales included.
        squared_error, squared_sum: against the original weights; None without `--source`.
    """

    name: str
    bits: int | None
    format: str | None = None
    tensors: int = 0
    weights: int = 0
    bytes: int = 0
    squared_error: float | None = None
    squared_sum: float | None = None

    @property
    def label(self) -> str:
        """Its format in few characters."""
        return "NVFP4" if self.format == "nvfp4" else str(self.bits or "-")

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight."""
        return 8 * self.bytes / max(1, self.weights)

    @property
    def nmse(self) -> float | None:
        """Squared error over squared sum."""
        if self.squared_error is None or not self.squared_sum:
            return None
        return self.squared_error / self.squared_sum

    @property
    def sqnr(self) -> float | None:
        """Signal to quantization noise in dB."""
        if self.nmse is None:
            return None
        return -10 * math.log10(self.nmse) if self.nmse else math.inf

    def add_error(self, decoded: torch.Tensor, original: torch.Tensor) -> None:
        """Add a matrix's squared error; the first one begins to count weights anew, without padding."""
        if self.squared_error is None or self.squared_sum is None:
            self.squared_error = self.squared_sum = 0.0
            self.weights = 0
        self.squared_error += float((decoded.float() - original.float()).square().sum())
        self.squared_sum += float(original.float().square().sum())
        self.weights += original.numel()

    def as_json(self) -> dict[str, object]:
        """What `--json` prints of it."""
        counted = ("name", "format", "bits", "tensors", "weights", "bytes", "bits_per_weight", "nmse")
        return {key: getattr(self, key) for key in counted} | {"sqnr_db": self.sqnr}


@dataclass
class Folder:
    """What a model folder holds, and how to learn more about it.

    Attributes:
        modules: by name.
        how: what they are quantized to, for the title; empty for k-bit ones, which differ by module.
        quantized: number of quantized tensors; 0 for a folder without any.
        why_not: why a module is not quantized, where its config says it.
        add_errors: decode every quantized tensor and add its error against a source's; yields after each.
    """

    modules: dict[str, Module]
    how: str = ""
    quantized: int = 0
    why_not: Callable[[str], str | None] = field(default=lambda name: None)
    add_errors: Callable[[Mapping[str, TensorInfo]], Iterator[object]] | None = None


def read(index: Mapping[str, TensorInfo], name: str, expert: int | None = None) -> torch.Tensor:
    """A tensor of a checkpoint, or one expert of it.

    Raises:
        ValueError: its file is truncated.
    """
    import torch

    from kbit.integrations.streaming.reader import read_tensor

    return read_tensor(name, index[name], torch.device("cpu"), expert)


def missing(name: str) -> ValueError:
    """That a source does not hold what a checkpoint was made from."""
    return ValueError(f"the source has no tensor {name!r}. Is it the model this was made from?")


def other_shape(name: str, shape: Sequence[int], stored: str) -> ValueError:
    """That a source holds a tensor in another shape than the one that was quantized."""
    return ValueError(
        f"the source's tensor {name!r} is {list(shape)}, and what was quantized is {stored}. Is it the model "
        f"this was made from?"
    )


def count_unquantized(modules: dict[str, Module], name: str, info: TensorInfo) -> None:
    """Count a tensor that is no part of a quantized one."""
    module = modules.setdefault(name, Module(name, None))
    module.bytes += info.nbytes
    module.tensors += 1
    module.weights += math.prod(info.shape)


def in_natural_order(modules: Mapping[str, Module]) -> dict[str, Module]:
    """Modules by name, layer 2 in front of layer 10."""
    return dict(sorted(modules.items(), key=lambda one: re.sub(r"\d+", lambda n: n[0].zfill(20), one[0])))


def total(modules: list[Module], name: str, like: Module | None = None) -> Module:
    """The sum of modules, of the format of `like`."""
    result = Module(name, like.bits, like.format) if like else Module(name, None)
    for module in modules:
        result.tensors += module.tensors
        result.weights += module.weights
        result.bytes += module.bytes
    errors = [module for module in modules if module.squared_error is not None]
    if errors:
        result.squared_error = sum(module.squared_error or 0.0 for module in errors)
        result.squared_sum = sum(module.squared_sum or 0.0 for module in errors)
    return result


def totals(modules: list[Module]) -> Iterator[Module]:
    """Sums by format and width, fewest bits first, unquantized last, and of all."""
    kinds = {(module.bits is None, module.bits or 0, module.label): module for module in modules}
    for (unquantized, _, label), like in sorted(kinds.items(), key=lambda kind: kind[0]):
        name = "unquantized" if unquantized else f"all {like.bits}-bit" if label != "NVFP4" else "all NVFP4"
        yield total([module for module in modules if module.label == label], name, like)
    yield total(modules, "all")


def large(modules: list[Module]) -> list[tuple[str, int, Module]]:
    """Large parameters that stayed unquantized: (name, in how many layers, the largest of them).

    Experts that are stored one by one are one parameter in memory, and are counted together, named as
    the first of them, by which a policy knows them.
    """
    parameters: dict[str, Module] = {}
    for module in (module for module in modules if module.bits is None):
        name = re.sub(r"(?<=\.experts\.)\d+(?=\.)", "*", module.name)
        whole = parameters.setdefault(name, Module(module.name, None))
        whole.weights += module.weights
        whole.bytes += module.bytes
    from kbit.nn import leftovers

    layers: dict[str, dict[str, Module]] = {}
    for name, module in parameters.items():
        if module.weights >= leftovers.LARGE:
            layers.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), {})[name] = module
    return [
        (
            pattern if len(found) > 1 else next(iter(found)),
            len(found),
            max(found.values(), key=lambda one: one.weights),
        )
        for pattern, found in layers.items()
    ]
