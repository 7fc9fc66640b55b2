"""`kbit tune`: measure which CUDA kernel is fastest for the layers of some models."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kbit.cli.bench_kernels import Bits, Dtypes, Models, Names, Rows, choose
from kbit.cli.consoles import Console
from kbit.cli.outputs import check_file

if TYPE_CHECKING:
    from kbit.backends.cuda.tables import Problem
    from kbit.bench.tune_record import Record

console = Console()


def tune(
    shape: Names = "",
    model: Models = "",
    rows: Rows = "",
    bits: Bits = "2,3,4,5",
    dtype: Dtypes = "fp16",
    gated: Annotated[
        bool, typer.Option("--gated", help="Also measure merged gates and ups with their activation.")
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing after so long; run again to go on.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=7, help="Timed replays of each candidate.")] = 7,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what the table holds.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(callback=check_file, help="Table to write; by default this GPU's in the cache."),
    ] = None,
) -> None:
    """Find the fastest CUDA kernels on this GPU. Measures layers of models, and keeps a table of them."""
    from kbit.backends.cuda import driver, tables
    from kbit.bench import gpu_timing
    from kbit.bench import tune as bench
    from kbit.bench.tune_record import Record

    choice = choose(shape, model, rows or ",".join(map(str, bench.ROWS)), bits, dtype, repeats)
    gpu_timing.require_gpu("kbit tune")
    import torch

    index = torch.cuda.current_device()
    file = out or tables.user_file(driver.device_name(index))
    record = Record(file, driver.device_limits(index), bench.provenance(), fresh)
    problems = bench.problems(choice.shapes, choice.plan.bits, choice.dtypes, gated)
    tasks = [(problem, m) for problem in problems for m in choice.plan.rows]
    _compile([task for task in tasks if not record.has(*task)], record)
    done = _measure(tasks, record, repeats, seconds)
    counts = Counter(row.kernel for _, row in record.rows())
    words = ", ".join(f"{kernel} {count}" for kernel, count in sorted(counts.items()))
    console.print(f"{len(record)} rows in {file}; fastest: {words}", markup=False, soft_wrap=True)
    if not done:
        missing = sum(not record.has(*task) for task in tasks)
        console.print(f"{missing} of {len(tasks)} are left: the same command goes on (without --fresh)")


def _progress() -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    return Progress(*columns, console=console, transient=True)


def _compile(tasks: list[tuple[Problem, int]], record: Record) -> None:
    """Compile in parallel what would be compiled one by one; what is refused surfaces when it is launched."""
    from kbit.backends.cuda.compiler import compile_many
    from kbit.bench import tune as bench

    wanted = bench.specs(tasks, record.device)
    if not wanted:
        return
    with _progress() as progress:
        bar = progress.add_task("compiling", total=len(wanted))
        compile_many(wanted, on_done=lambda *_: progress.advance(bar))


def _measure(tasks: list[tuple[Problem, int]], record: Record, repeats: int, seconds: float | None) -> bool:
    from kbit.bench import tune as bench

    with _progress() as progress:
        bar = progress.add_task("measuring", total=len(tasks))

        def on_done(problem: Problem, m: int) -> None:
            size = f"{problem.in_features}x{problem.out_features} k={problem.bits} M={m}"
            progress.update(bar, advance=1, description=escape(size))

        return bench.tune(tasks, record, bench.GpuMeasure(repeats), seconds, on_done)
