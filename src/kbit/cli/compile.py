"""`kbit compile`: fill the cache of CUDA kernels ahead of time, for machines with a GPU or without."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.tables import show
from kbit.format.words import counted

if TYPE_CHECKING:
    from kbit.backends.cuda.compiler import KernelSpec, Outcome

    # With its architecture.
    Kernel = tuple[KernelSpec, str, Outcome]

_ERRORS_SHOWN = 20


def compile_kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            metavar="ARCH",
            help="Architecture, such as 80, 89, 90a or 100a; this machine's by default; repeatable.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Threads; as many as cores by default.")
    ] = None,
    kernel: Annotated[str, typer.Option(help="Only kernels with this in their name, and list each.")] = "",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List every kernel, not only every source file.")
    ] = False,
) -> None:
    """Compile every CUDA kernel ahead of time. Needs no GPU; exit 1 if the compiler refuses one."""
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
    compiler, count = chosen_compiler().name, counted(len(wanted), "kernel")
    console.print(f"{compiler}, {count} into {cubin_folder()}", soft_wrap=True)
    start = time.perf_counter()
    outcomes = _compile_with_progress(wanted, jobs, console)
    kernels = [(*pair, outcome) for pair, outcome in zip(wanted, outcomes, strict=True)]
    if verbose or kernel:
        _print_each(kernels)
    else:
        show(_by_source(kernels))
    errors = [outcome for outcome in outcomes if isinstance(outcome, ValueError)]
    cached = sum(not isinstance(outcome, ValueError) and outcome.cached for outcome in outcomes)
    console.print(
        f"{len(outcomes) - cached - len(errors)} compiled in {time.perf_counter() - start:.0f} s, "
        f"{cached} were in the cache, {len(errors)} refused"
    )
    if errors:
        _print_errors(errors)
        raise typer.Exit(1)


def _canonical(archs: list[str]) -> list[str]:
    from kbit.backends.cuda.compiler import as_on_chips, canonical_arch

    return list(dict.fromkeys(as_on_chips(canonical_arch(arch)) for arch in archs))


def _archs_here() -> list[str]:
    from kbit.backends.cuda import driver
    from kbit.backends.cuda.compiler.arch import OLDEST_ARCH

    try:
        if archs := driver.archs_here():
            return archs
        reason = f"It has no GPU of sm_{OLDEST_ARCH} or newer."
    except ValueError as error:
        reason = str(error)
    raise ValueError(
        f"compile: this machine's architecture is unknown ({reason}) Name those wanted: kbit compile "
        f"--arch 80 (A100), 86 or 89 (RTX 30, 40, L40), 90a (H100, H200), 100a (B200), 120a (RTX 50)."
    )


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


def _by_source(kernels: Sequence[Kernel]) -> Table:
    """A row for each source and architecture; registers are the most of any kernel."""
    headers = ("source", "arch", "kernels", "compiled", "registers", "spilling", "refused")
    table = text_table(None, headers, left=("source", "arch"))
    for source, arch in dict.fromkeys((spec.source, arch) for spec, arch, _ in kernels):
        found = [outcome for spec, at, outcome in kernels if (spec.source, at) == (source, arch)]
        done = [outcome for outcome in found if not isinstance(outcome, ValueError)]
        spilling, refused = sum(bool(one.spill_bytes) for one in done), len(found) - len(done)
        table.add_row(
            source,
            arch,
            str(len(found)),
            str(sum(not one.cached for one in done)),
            str(max((one.registers for one in done), default="")),
            str(spilling or ""),
            str(refused or ""),
            style="red" if refused else "yellow" if spilling else None,
        )
    return table


def _print_each(kernels: Sequence[Kernel]) -> None:
    """A line for each kernel, its name last: names have up to 120 characters, and figures stay in columns."""
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        "registers  spill bytes  stack bytes  shared bytes  seconds            arch  kernel", style="bold"
    )
    for spec, arch, outcome in kernels:
        name = f"{arch:5} {spec.name}"
        if isinstance(outcome, ValueError):
            console.print(
                f"{'':9}  {'':11}  {'':11}  {'':12}  {'':7}  refused   {name}", style="red", markup=False
            )
            continue
        figures = f"{outcome.registers:9}  {outcome.spill_bytes:11}  {outcome.stack_bytes:11}"
        figures += f"  {outcome.shared_bytes:12}"
        how = f"{outcome.seconds:7.2f}  {'cached' if outcome.cached else 'compiled':8}"
        style = "yellow" if outcome.spill_bytes else None
        console.print(f"{figures}  {how}  {name}", style=style, markup=False)


def _print_errors(errors: Sequence[ValueError]) -> None:
    """Each message once: a compiler that does not know an architecture refuses all kernels alike."""
    console = Console(stderr=True, soft_wrap=True)
    messages = list(dict.fromkeys(map(str, errors)))
    for message in messages[:_ERRORS_SHOWN]:
        console.print(f"[bold red]error:[/bold red] {escape(message)}")
    if len(messages) > _ERRORS_SHOWN:
        console.print(f"and {len(messages) - _ERRORS_SHOWN} more; --kernel picks some")
