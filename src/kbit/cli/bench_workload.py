"""`kbit bench workload`: what a kernel table means for one user and for many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kbit.cli.consoles import Console
from kbit.cli.options import numbers, one_of, widths, words
from kbit.cli.outputs import JsonFile, check_picture, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.workload.model_layers import ModelLayers
    from kbit.bench.workload.times import Times

console = Console()


def workload(
    table: Annotated[Path, typer.Argument(help="A result of `bench kernels --json`, M up to --budget.")],
    distribution: Annotated[
        Path | None, typer.Option(help="Token distribution (.json) or log of requests (.jsonl).")
    ] = None,
    experts: Annotated[
        Path | None, typer.Option(help="A result of `bench moe --json`, for the layers of experts.")
    ] = None,
    model: Annotated[str, typer.Option(help="Models; by default all that the table has.")] = "",
    bits: Annotated[str, typer.Option(help="Bits per weight; by default all that the table has.")] = "",
    users: Annotated[str, typer.Option(help="Numbers of users served at once.")] = "1,4,8,16,32,64",
    dtype: Annotated[str, typer.Option("--dtype", help="Activations: fp16 or bf16.")] = "fp16",
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens an iteration beside decoding.")] = 512,
    budget: Annotated[int, typer.Option(min=1, help="Tokens of an iteration at most.")] = 2048,
    turns: Annotated[int, typer.Option(min=1, help="Turns simulated for more than one user.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(callback=check_picture, help="Also draw speed-up against users here.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """What a kernel table means for one user and for many.

    Share of time per kernel and speed-up over 16 bits, weighted by how often each M happens.

    One user: a prefill and its decode steps per turn. More: continuous batching, simulated; each iteration
    decodes for all who have an answer under way, then adds one chunk of the oldest prompt.
    """
    from kbit.bench import kernel_rows
    from kbit.bench.kernels import DTYPES
    from kbit.bench.workload import distributions, scenarios, tables, times
    from kbit.bench.workload import plot as plots
    from kbit.bench.workload.scheduler import Limits

    one_of("--dtype", dtype, tuple(DTYPES))
    header, rows = kernel_rows.load(table)
    grouped = []
    if experts is not None:
        gpu = header["machine"].get("gpu")
        grouped, header["grouped_from"] = times.load_grouped(experts, gpu), experts.name
    measured = times.from_result(header, rows, dtype, grouped)
    traffic = distributions.load(distribution)
    limits = Limits(chunk, budget)
    chosen = widths(bits) if bits else []
    steps = scenarios.steps_of(traffic, numbers("--users", users), limits, turns, seed)
    models = _models(words(model), measured)
    found = [scenarios.analyse(item, measured, steps, chosen) for item in models]
    result = tables.as_json(header, traffic, limits, {"turns": turns, "seed": seed}, found)
    write_json(json_file, result)  # before anything is printed, to a reader that may be gone
    if plot is not None:
        plots.write(result, plot, [table] if experts is None else [table, experts])
    for analysis in found:
        show(tables.table(analysis))
        for line in (*tables.verdicts(analysis), *analysis.notes):
            console.print(line, markup=False, soft_wrap=True)
    console.print(times.INTERPOLATION, markup=False, soft_wrap=True)


def _models(names: list[str], measured: Times) -> list[ModelLayers]:
    """The named models, or those with all their layers in the table."""
    from kbit.bench.shapes import MODELS
    from kbit.bench.workload.model_layers import layers_of
    from kbit.bench.workload.scenarios import nothing_measured

    if names:
        return [layers_of(name) for name in names]
    models = [layers_of(name) for name in MODELS]
    complete = [item for item in models if measured.bits(item)]
    if not complete:
        raise ValueError("\n".join(nothing_measured(item, measured) for item in models[:1]))
    return complete
