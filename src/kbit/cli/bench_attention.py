"""`kbit bench attention`: decoding steps of attention layers, against PyTorch's attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kbit.bench.text_table import in_sections, text_table
from kbit.cli.consoles import Console
from kbit.cli.options import names, numbers
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.attention import AttentionRow

console = Console()


def _table(model: str, rows: Sequence[AttentionRow], bandwidth: float) -> Table:
    from kbit.bench.attention import TORCH, speedup

    headers = ("batch", "tokens", "kernel", "us", "spread", "GB/s", "% read", f"vs {TORCH}")
    table = text_table(f"{model}: attention between the projections, one token", headers, left=("kernel",))
    for row in in_sections(table, rows, lambda row: row.batch):
        speed, ratio = row.cache_bytes / row.us / 1e3, speedup(rows, row)
        table.add_row(
            *(str(row.batch), str(row.tokens), row.arm, f"{row.us:.2f}", f"{100 * row.spread:.0f}%"),
            *(f"{speed:.0f}", f"{100 * speed / bandwidth:.0f}", f"{ratio:.2f}"),
            style="red" if ratio < 1 else None,
        )
    return table


def attention(
    model: Annotated[str, typer.Option(help="Layers of these shipped models; all by default.")] = "",
    batch: Annotated[str, typer.Option(help="Sequences at once.")] = "1,4,32",
    tokens: Annotated[str, typer.Option(help="Tokens that the cache has already.")] = "255,2047,16383",
    room: Annotated[
        int | None, typer.Option(min=2, help="Tokens that the cache has room for; default: one more.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=7, help="Timed replays of each arm.")] = 11,
    json_file: JsonFile = None,
) -> None:
    """A decoding step of attention layers against PyTorch's. Caches colder than L2, CUDA-graph replays."""
    from kbit.bench import attention as bench
    from kbit.bench import gpu_timing

    models = names("--model", model, list(bench.LAYERS)) if model else list(bench.LAYERS)
    batches, counts = numbers("--batch", batch), numbers("--tokens", tokens)
    gpu_timing.require_gpu("kbit bench attention")
    result = gpu_timing.result_header(repeats) | {"dtype": "bf16"}
    measured: list[AttentionRow] = []
    for rows in bench.measure(models, batches, counts, room, repeats, gpu_timing.measure):
        measured += rows
        us = ", ".join(f"{row.arm} {row.us:.2f} us" for row in rows)
        console.print(f"{rows[0].model}, {rows[0].batch} x {rows[0].tokens}: {us}", markup=False)
        # At once, so that an interruption loses one problem.
        write_json(json_file, result | {"rows": bench.as_json(measured)})
    for name in models:
        chosen = [row for row in measured if row.model == name]
        show(_table(name, chosen, result["read_bandwidth_gb_s"]))
