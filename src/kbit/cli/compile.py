"""`kbit compile`: fill the cache of CUDA kernels ahead of time, for machines with a GPU or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from kbit.backends.cuda.compiler import KernelSpec, Outcome

COLUMNS = ("kernel", "arch", "registers", "spill bytes", "shared bytes", "seconds", "")


def compile_kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Such as 80, 89, 90a, 100a; once for each. This machine's by default."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Threads; the cores by default.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels with this in their name.")] = "",
) -> None:
    """Compile every CUDA kernel into the cache, so that the first run need not; exit 1 if one is refused."""
    from kbit.backends.cuda.compiler import chosen_compiler, cubin_folder, folder_problem
    from kbit.backends.cuda.variants import all_specs

    archs = _canonical(arch) if arch else _archs_here()
    wanted = [(spec, name) for name in archs for spec in all_specs(name) if kernel in spec.name]
    if not wanted:
        raise ValueError(f"compile: no kernel has {kernel!r} in its name.")
    problem = folder_problem(cubin_folder())
    if problem is not None:
        raise ValueError(
            f"compile: {cubin_folder()} cannot keep kernels: {problem}. Set KBIT_CACHE to another."
        )
    console = Console()
    console.print(f"{chosen_compiler().name}, {len(wanted)} kernels into {cubin_folder()}", soft_wrap=True)
    outcomes = _compile_with_progress(wanted, jobs, console)
    console.print(_table(wanted, outcomes))
    errors = [outcome for outcome in outcomes if isinstance(outcome, ValueError)]
    for error in errors:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/bold red] {escape(str(error))}")
    if errors:
        raise typer.Exit(1)


def _canonical(archs: list[str]) -> list[str]:
    from kbit.backends.cuda.compiler import canonical_arch

    return list(dict.fromkeys(canonical_arch(arch) for arch in archs))


def _archs_here() -> list[str]:
    from kbit.backends.cuda.driver import device_arch, device_count

    try:
        archs = [device_arch(index) for index in range(device_count())]
    except ValueError as error:
        raise ValueError(
            f"compile: this machine's architecture is unknown ({error}) Name those wanted: kbit compile "
            f"--arch 80 (A100), 86 or 89 (RTX 30, 40, L40), 90a (H100, H200), 100a (B200), 120a (RTX 50)."
        ) from error
    return list(dict.fromkeys(archs))


def _compile_with_progress(
    wanted: list[tuple[KernelSpec, str]], jobs: int | None, console: Console
) -> list[Outcome]:
    from kbit.backends.cuda.compiler import compile_many

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(wanted))

        def on_done(spec: KernelSpec, arch: str, _: Outcome) -> None:
            progress.update(task, advance=1, description=escape(f"{spec.name} sm_{arch}"))

        return compile_many(wanted, jobs, on_done=on_done)


def _table(wanted: list[tuple[KernelSpec, str]], outcomes: list[Outcome]) -> Table:
    table = Table()
    for header in COLUMNS:
        table.add_column(
            header, justify="left" if header in ("kernel", "arch", "") else "right", overflow="fold"
        )
    for (spec, arch), outcome in zip(wanted, outcomes, strict=True):
        name = escape(spec.name)
        if isinstance(outcome, ValueError):
            table.add_row(name, arch, "", "", "", "", "refused", style="red")
            continue
        table.add_row(
            name,
            arch,
            str(outcome.registers),
            str(outcome.spill_bytes),
            str(outcome.shared_bytes),
            f"{outcome.seconds:.2f}",
            "cached" if outcome.cached else "compiled",
            style="yellow" if outcome.spill_bytes else None,
        )
    return table
