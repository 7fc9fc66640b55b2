"""`kbit inspect`: what is in a model folder, module by module, from its headers; errors where asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kbit.cli.tables import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kbit.format.policy import QuantizationPolicy
    from kbit.format.safetensors_header import TensorInfo

console = Console()


@dataclass
class Module:
    """One module of a checkpoint: a linear layer, a table, or all experts of a layer together.

    Attributes:
        bits: code width; None where it is not quantized.
        weights: number of weights, those of rows padded to 32 counted where K is not known otherwise.
        bytes: stored bytes, scales included.
        squared_error, squared_sum: against the original weights; None without `--source`.
    """

    name: str
    bits: int | None
    tensors: int = 0
    weights: int = 0
    bytes: int = 0
    squared_error: float | None = None
    squared_sum: float | None = None

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

    def as_json(self) -> dict[str, object]:
        """What `--json` prints of it."""
        counted = ("name", "bits", "tensors", "weights", "bytes", "bits_per_weight", "nmse")
        exact = {"sqnr_db": None if self.sqnr == math.inf else self.sqnr}  # JSON has no infinity
        return {key: getattr(self, key) for key in counted} | exact


def read_modules(index: Mapping[str, TensorInfo], policy: QuantizationPolicy | None) -> dict[str, Module]:
    """Sum a checkpoint's tensors up by module.

    Args:
        index: see `kbit.format.model_files.read_index`.
        policy: the checkpoint's, None if it is not quantized.
    """
    from kbit.format.names import ABSMAX, module_of, original_of

    modules: dict[str, Module] = {}
    for name, info in index.items():
        quantized = original_of(name) != name
        owner = module_of(name)
        bits = policy.bits_for(owner) if policy is not None and quantized else None
        key = owner if quantized else name
        module = modules.setdefault(key, Module(key, bits))
        module.bytes += info.nbytes
        if name.endswith(ABSMAX):
            module.tensors += 1
            module.weights += 32 * math.prod(info.shape)
        elif not quantized:
            module.tensors += 1
            module.weights += math.prod(info.shape)
    return modules


def _quantized_names(index: Mapping[str, TensorInfo]) -> list[str]:
    from kbit.format.names import PACKED

    return [name.removesuffix(PACKED) for name in index if name.endswith(PACKED)]


def add_errors(
    modules: dict[str, Module],
    index: Mapping[str, TensorInfo],
    source: Mapping[str, TensorInfo],
    policy: QuantizationPolicy,
) -> Iterator[str]:
    """Decode every quantized tensor and add up its squared error against the original; yields names.

    Raises:
        ValueError: the source does not hold a tensor, or holds it in another shape.
    """
    import torch

    from kbit.format import QuantizedTensor
    from kbit.format.names import ABSMAX, PACKED, SCALE, module_of
    from kbit.ops import dequantize

    for name in _quantized_names(index):
        module = modules[module_of(name)]
        assert module.bits is not None
        if name not in source:
            raise ValueError(f"the source has no tensor {name!r}. Is it the model this was made from?")
        original = _read(source, name)
        packed, absmax = _read(index, name + PACKED), _read(index, name + ABSMAX)
        stored = index.get(name + SCALE)
        scale = _read(index, name + SCALE) if stored else torch.ones(packed.shape[:-2])
        shape = tuple(original.shape)
        q = QuantizedTensor(packed, absmax, policy.codebook_for(module.bits), scale, module.bits, shape)
        if module.squared_error is None or module.squared_sum is None:
            module.squared_error = module.squared_sum = 0.0
            module.weights = 0
        module.squared_error += float((dequantize(q) - original.float()).square().sum())
        module.squared_sum += float(original.float().square().sum())
        module.weights += original.numel()
        yield name


def _read(index: Mapping[str, TensorInfo], name: str) -> torch.Tensor:
    import torch

    from kbit.integrations.streaming.reader import read_tensor

    return read_tensor(name, index[name], torch.device("cpu"))


def inspect(
    folder: Annotated[Path, typer.Argument(help="Model folder, quantized or not.")],
    source: Annotated[
        Path | None, typer.Option(help="The unquantized model: adds each module's error.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Bits per weight, bytes and error of every module. Without --source only headers are read."""
    from kbit.format.checkpoint import validate_checkpoint
    from kbit.format.model_files import read_config, read_index

    quantized = read_config(folder).get("quantization_config") is not None
    policy = validate_checkpoint(folder) if quantized else None
    index = read_index(folder)
    modules = read_modules(index, policy)
    if source is not None:
        if policy is None:
            raise ValueError(f"{folder}: not quantized, so there is no error to compute. Drop --source.")
        originals = read_index(source)
        if _quantized_names(originals):
            raise ValueError(f"--source {source} is quantized. Give the folder that {folder} was made from.")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            names = add_errors(modules, index, originals, policy)
            for _ in progress.track(names, total=len(_quantized_names(index)), description="decoding"):
                pass
    if as_json:
        print(json.dumps([module.as_json() for module in modules.values()], indent=1))
        return
    _print(list(modules.values()), folder, policy)


def _reasons(
    policy: QuantizationPolicy | None, folder: Path, large: list[tuple[str, int, Module]]
) -> dict[str, str]:
    """{tensor: why it is not quantized}, of the large ones of a quantized model where that is known."""
    from kbit.format.names import module_of

    if policy is None:
        return {}
    reasons = {module.name: policy.why_not(module_of(module.name)) for _, _, module in large}
    found = {name: reason for name, reason in reasons.items() if reason}
    if missing := reasons.keys() - found.keys():
        # Only then: importing transformers takes longer than all else here.
        from kbit.integrations.streaming.jobs import meta_model
        from kbit.integrations.transformers.report import reasons_in_model

        # A table of what is in the files needs no model: no error of building one may cost it.
        with suppress(Exception):
            found |= reasons_in_model(meta_model(folder), policy, missing)
    return found


def _print(modules: list[Module], folder: Path, policy: QuantizationPolicy | None) -> None:
    with_error = any(module.sqnr is not None for module in modules)
    table = Table(title=escape(str(folder)))
    for header in ("module", "bits", "weights", "bits/weight", "MB", *(["SQNR dB"] if with_error else [])):
        if header == "module":
            table.add_column(header, overflow="fold")  # names have no spaces
        else:
            table.add_column(header, justify="right")
    for module in (module for module in modules if module.bits is not None):
        table.add_row(escape(module.name), str(module.bits), *_cells(module, with_error))
    table.add_section()
    for bits in sorted({module.bits for module in modules}, key=lambda width: (width is None, width or 0)):
        total = _total([module for module in modules if module.bits == bits], bits)
        table.add_row(total.name, str(bits or "-"), *_cells(total, with_error))
    everything = _total(modules, None)
    table.add_row("all", "", *_cells(everything, with_error), style="bold")
    show(table)
    large = _large(modules)
    reasons = _reasons(policy, folder, large)
    for name, count, module in large:
        times = f"{count} x " if count > 1 else ""
        why = f": {reasons[module.name]}" if module.name in reasons else ""
        console.print(
            f"[yellow]unquantized[/yellow] {escape(name)}: {times}{module.weights / 1e6:.1f} M weights, "
            f"{times}{module.bytes / 1e6:.1f} MB{escape(why)}",
            soft_wrap=True,
        )


def _large(modules: list[Module]) -> list[tuple[str, int, Module]]:
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
    from kbit.nn import replace

    layers: dict[str, dict[str, Module]] = {}
    for name, module in parameters.items():
        if module.weights >= replace.LARGE:
            layers.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), {})[name] = module
    return [
        (
            pattern if len(found) > 1 else next(iter(found)),
            len(found),
            max(found.values(), key=lambda one: one.weights),
        )
        for pattern, found in layers.items()
    ]


def _cells(module: Module, with_error: bool) -> list[str]:
    cells = [f"{module.weights:,}", f"{module.bits_per_weight:.2f}", f"{module.bytes / 1e6:.2f}"]
    if with_error:
        cells.append("" if module.sqnr is None else f"{module.sqnr:.1f}")
    return cells


def _total(modules: list[Module], bits: int | None) -> Module:
    total = Module(f"all {bits}-bit" if bits else "unquantized", bits)
    for module in modules:
        total.tensors += module.tensors
        total.weights += module.weights
        total.bytes += module.bytes
    errors = [module for module in modules if module.squared_error is not None]
    if errors:
        total.squared_error = sum(module.squared_error or 0.0 for module in errors)
        total.squared_sum = sum(module.squared_sum or 0.0 for module in errors)
    return total
