"""`kbit inspect`: what is in a model folder, module by module, from its headers; errors where asked for."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kbit.cli.consoles import Console, warn
from kbit.cli.hub import folder_of, is_cached, model_name
from kbit.cli.inspected import (
    Folder,
    Module,
    count_unquantized,
    in_natural_order,
    large,
    missing,
    other_shape,
    read,
    totals,
)
from kbit.cli.options import in_options
from kbit.cli.outputs import PrintedJson, print_json, refuse_arguments
from kbit.cli.tables import show
from kbit.format.words import first_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kbit.format.policy import QuantizationPolicy
    from kbit.format.safetensors_header import TensorInfo

console = Console()


def read_modules(index: Mapping[str, TensorInfo], policy: QuantizationPolicy | None) -> dict[str, Module]:
    """Sum a checkpoint's tensors up by module.

    Args:
        index: see `kbit.format.model_files.read_index`.
        policy: the checkpoint's, None if it is not quantized.
    """
    from kbit.format.names import ABSMAX, module_of, original_of

    modules: dict[str, Module] = {}
    for name, info in index.items():
        if original_of(name) == name:
            count_unquantized(modules, name, info)
            continue
        owner = module_of(name)
        bits = policy.bits_for(owner) if policy is not None else None
        module = modules.setdefault(owner, Module(owner, bits, "k-bit" if bits else None))
        module.bytes += info.nbytes
        if name.endswith(ABSMAX):
            module.tensors += 1
            module.weights += 32 * math.prod(info.shape)
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
    from kbit.format.codebook import BLOCK_SIZE
    from kbit.format.names import ABSMAX, PACKED, SCALE, module_of
    from kbit.format.reference import blocks_of
    from kbit.ops import dequantize

    for name in _quantized_names(index):
        module = modules[module_of(name)]
        assert module.bits is not None
        if name not in source:
            raise missing(name)
        original = read(source, name)
        packed, absmax = read(index, name + PACKED), read(index, name + ABSMAX)
        *rows, blocks = absmax.shape
        if (*original.shape[:-1], blocks_of(original.shape[-1])) != tuple(absmax.shape):
            raise other_shape(name, original.shape, f"{[*rows, BLOCK_SIZE * blocks]}, or a little narrower")
        stored = index.get(name + SCALE)
        scale = read(index, name + SCALE) if stored else torch.ones(packed.shape[:-2])
        shape = tuple(original.shape)
        q = QuantizedTensor(packed, absmax, policy.codebook_for(module.bits), scale, module.bits, shape)
        module.add_error(dequantize(q), original)
        yield name


def _reasons_of_model(folder: Path, policy: QuantizationPolicy, modules: list[Module]) -> dict[str, str]:
    """{tensor: why it is not quantized} of large ones for which the policy's names do not say it."""
    from kbit.format.names import module_of
    from kbit.integrations.streaming.jobs import meta_model
    from kbit.integrations.transformers.report import reasons_in_model

    names = [module.name for _, _, module in large(modules)]
    unexplained = [name for name in names if policy.why_not(module_of(name)) is None]
    # A table of what is in the files needs no model: no error of building one may cost it.
    with suppress(Exception):
        return reasons_in_model(meta_model(folder), policy, unexplained)
    return {}


def _read_folder(folder: Path) -> Folder:
    """Look at a folder's headers.

    Raises:
        ValueError: they are not what its config says, or it is in a format that kbit does not know.
    """
    from kbit.cli.inspect_nvfp4 import read_nvfp4
    from kbit.format.checkpoint import validate_checkpoint
    from kbit.format.model_files import read_config, read_index
    from kbit.format.names import ABSMAX, module_of

    config = read_config(folder)
    found = read_nvfp4(folder, config)
    if found is not None:
        return found
    if config.get("quantization_config") is None:
        index = read_index(folder)
        coded = [name for name in _quantized_names(index) if name + ABSMAX in index]
        if coded:
            raise ValueError(
                f"{folder}: {coded[0]} and others are k-bit codes, but config.json has no "
                f"quantization_config, so nobody can tell their codebook. Restore the "
                f"config.json that they were saved with."
            )
        return Folder(read_modules(index, None))
    policy = validate_checkpoint(folder)
    index = read_index(folder)
    modules = read_modules(index, policy)

    @functools.cache  # and only if asked: importing transformers takes longer than all else here
    def reasons_of_model() -> dict[str, str]:
        return _reasons_of_model(folder, policy, list(modules.values()))

    return Folder(
        modules,
        quantized=len(_quantized_names(index)),
        why_not=lambda name: policy.why_not(module_of(name)) or reasons_of_model().get(name),
        add_errors=lambda source: add_errors(modules, index, source, policy),
    )


def inspect(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(help="Model, quantized or not: a folder, or ORG/MODEL on the hub.")
    ],
    source: Annotated[
        Path | None, typer.Option(help="The unquantized model, likewise: adds each module's error.")
    ] = None,
    as_json: PrintedJson = False,
) -> None:
    """Bits per weight, bytes and error of every module. Without --source only headers are read."""
    from kbit.format.model_files import read_index
    from kbit.nvfp4.readers.stored import stored_weights

    refuse_arguments(context, as_json)
    folder, source = folder_of(folder), source and folder_of(source)
    found = _read_folder(folder)
    found.modules = in_natural_order(found.modules)
    if source is not None:
        if found.add_errors is None:
            raise ValueError(f"{folder}: not quantized, so there is no error to compute. Drop --source.")
        originals = read_index(source)
        if _quantized_names(originals) or stored_weights(originals):
            raise ValueError(f"--source {source} is quantized. Give the folder that {folder} was made from.")
        with Progress(console=Console(stderr=True), transient=True) as progress:
            steps = found.add_errors(originals)
            for _ in progress.track(steps, total=found.quantized, description="decoding"):
                pass
        _say_what_is_not_finite(found.modules.values())
    if as_json:
        print_json([module.as_json() for module in found.modules.values()])
        return
    _print(found, folder)


def _say_what_is_not_finite(modules: Iterable[Module]) -> None:
    names = [module.name for module in modules if not math.isfinite(module.squared_sum or 0.0)]
    if names:
        warn(f"the source holds NaN or Inf in {first_of(names)}.")


def _print(found: Folder, folder: Path) -> None:
    modules = list(found.modules.values())
    with_error = any(module.sqnr is not None for module in modules)
    name = model_name(folder) if is_cached(folder) else str(folder)
    table = Table(title=escape(f"{name}\n{found.how}" if found.how else name))
    for header in ("module", "bits", "weights", "bits/weight", "MB", *(["SQNR dB"] if with_error else [])):
        if header == "module":
            table.add_column(header, overflow="fold")  # names have no spaces
        else:
            table.add_column(header, justify="right")
    for module in (module for module in modules if module.bits is not None):
        table.add_row(escape(module.name), module.label, *_cells(module, with_error))
    table.add_section()
    *parts, everything = totals(modules)
    for each in parts:
        table.add_row(each.name, each.label, *_cells(each, with_error))
    table.add_row(everything.name, "", *_cells(everything, with_error), style="bold")
    show(table)
    for name, count, module in large(modules):
        times = f"{count} x " if count > 1 else ""
        reason = found.why_not(module.name)
        console.print(
            f"[yellow]unquantized[/yellow] {escape(name)}: {times}{module.weights / 1e6:.1f} M weights, "
            f"{times}{module.bytes / 1e6:.1f} MB{escape(f': {in_options(reason)}' if reason else '')}",
            soft_wrap=True,
        )


def _cells(module: Module, with_error: bool) -> list[str]:
    cells = [f"{module.weights:,}", f"{module.bits_per_weight:.2f}", f"{module.bytes / 1e6:.2f}"]
    if with_error:
        cells.append("" if module.sqnr is None else f"{module.sqnr:.1f}")
    return cells
