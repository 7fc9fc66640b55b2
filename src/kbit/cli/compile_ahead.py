"""Kernels of a loaded model, compiled on all cores while nobody waits for a token yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kbit.cli.consoles import Console
from kbit.nn import compile_kernels


def compile_ahead(model: Any, tokens: Sequence[int] | None = None) -> None:
    """`kbit.compile_kernels` of a model with a progress bar, which leaves a line if it took time."""
    console = Console(stderr=True)
    columns = (
        TextColumn("compiling kernels, once for this GPU"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(done: int, total: int, _: str) -> None:
            bar.update(task, completed=done, total=total, visible=True)

        compiled = compile_kernels(model, tokens, progress=show)
    if compiled:
        console.print(f"[dim]compiled {compiled} kernels for this GPU, once[/dim]")
