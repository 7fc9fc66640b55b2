"""`kbit bench moe`: products with many experts, the whole layer around them, and the router before it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kbit.bench.text_table import in_sections, text_table
from kbit.cli.consoles import Console
from kbit.cli.options import names, numbers, one_of, widths
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.moe import MoeRow

console = Console()


class Part(str, Enum):
    """What is measured."""

    grouped = "grouped"
    layer = "layer"
    router = "router"
    all = "all"


def _table(problem: str, rows: Sequence[MoeRow], bandwidth: float) -> Table:
    from kbit.bench.kernel_rows import BASELINE, COUNTED_IN_TOKENS
    from kbit.bench.moe import baselines

    best = baselines(rows)
    unit = "tokens" if problem.startswith(COUNTED_IN_TOKENS) else "M each"
    headers = (unit, "kernel", "k", "us", "spread", "GB/s", "% read", "vs best 16-bit")
    table = text_table(problem, headers, left=("kernel",))
    for row in in_sections(table, rows, lambda row: row.rows):
        ratio, speed = best[problem, row.rows].us / row.us, row.read_bytes / row.us / 1e3
        cells = (str(row.rows), row.kernel, str(row.bits or ""), f"{row.us:.2f}", f"{100 * row.spread:.0f}%")
        slow = row.kind != BASELINE and ratio < 1
        table.add_row(
            *cells,
            f"{speed:.0f}",
            f"{100 * speed / bandwidth:.0f}",
            f"{ratio:.2f}",
            style="red" if slow else None,
        )
    return table


def moe(
    part: Annotated[Part, typer.Option(help="Products, the whole layer, the router, or all.")] = Part.all,
    shape: Annotated[str, typer.Option(help="Products: gu (2048x512), dn (512x2048).")] = "gu,dn",
    experts: Annotated[str, typer.Option(help="Products: numbers of experts.")] = "8,128",
    rows: Annotated[str, typer.Option("--rows", "-m", help="Products: rows M of each expert.")] = (
        "1,2,4,8,16,64,512"
    ),
    batch: Annotated[str, typer.Option(help="Layer and router: numbers of tokens.")] = "1,4,32,256,2048",
    routing: Annotated[str, typer.Option(help="Layer: uniform, zipf.")] = "uniform,zipf",
    bits: Annotated[str, typer.Option(help="Bits per weight, such as 2,4.")] = "4",
    dtype: Annotated[str, typer.Option(help="Activations: bf16, or fp16 for products alone.")] = "bf16",
    repeats: Annotated[int, typer.Option(min=7, help="Timed replays of each arm.")] = 11,
    json_file: JsonFile = None,
) -> None:
    """Products, layers and routers of experts against 16-bit paths. Cold weights, CUDA-graph replays."""
    from kbit.bench import gpu_timing, moe_layer, moe_router
    from kbit.bench import moe as bench
    from kbit.bench.kernels import DTYPES
    from kbit.bench.routings import ROUTINGS

    shapes = names("--shape", shape, list(bench.SHAPES))
    routings = names("--routing", routing, ROUTINGS)
    bit_widths, counts = widths(bits), numbers("--rows", rows)
    sizes, batches = numbers("--experts", experts), numbers("--batch", batch)
    one_of("--dtype", dtype, tuple(DTYPES))
    if dtype == "fp16" and part is not Part.grouped:
        raise ValueError(
            "--dtype fp16 is for --part grouped: torch's grouped_mm, the baseline of layers, runs expert by "
            "expert in float16."
        )
    gpu_timing.require_gpu("kbit bench moe")
    result = gpu_timing.result_header(repeats) | {"dtype": dtype}
    timed = (repeats, gpu_timing.measure)
    measured: list[MoeRow] = []
    runs = []
    if part in (Part.grouped, Part.all):
        settings = (counts, bit_widths, *timed, DTYPES[dtype])
        runs += [bench.grouped_rows(name, count, *settings) for count in sizes for name in shapes]
    if part in (Part.layer, Part.all):
        runs.append(moe_layer.layer_rows(batches, routings, bit_widths, *timed))
    if part in (Part.router, Part.all):
        runs.append(moe_router.router_rows(batches, *timed))
    for run in runs:
        for row in run:
            measured.append(row)
            console.print(f"{row.problem}, {row.rows}: {row.kernel} {row.us:.2f} us", markup=False)
            # At once, so that an interruption loses one row.
            write_json(json_file, result | {"rows": bench.as_json(measured)})
    for problem in dict.fromkeys(row.problem for row in measured):
        chosen = [row for row in measured if row.problem == problem]
        show(_table(problem, chosen, result["read_bandwidth_gb_s"]))
