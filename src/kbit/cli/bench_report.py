"""`kbit bench report`: one page from all result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kbit.cli.consoles import Console
from kbit.cli.outputs import check_page

console = Console()


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of the files that --json options wrote.")] = Path(
        "benchmarks/results"
    ),
    out: Annotated[Path, typer.Option(callback=check_page, help="Page to write.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page of all results. Kernels, models, traffic, quality, provenance."""
    from kbit.bench.report import page

    absent = page.write(folder, out)
    console.print(f"{out}: {out.stat().st_size / 1e3:.0f} kB", markup=False, soft_wrap=True)
    if absent:
        console.print(f"absent: {', '.join(absent)}; the page says how to make them", soft_wrap=True)
