"""`kbit bench nvfp4`: the quantizer, products under each contract, and the layer of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kbit.bench.text_table import in_sections, text_table
from kbit.cli.consoles import Console
from kbit.cli.options import names, numbers
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.nvfp4 import NVFP4Row

console = Console()


class Part(str, Enum):
    """What is measured."""

    quantize = "quantize"
    gemm = "gemm"
    layer = "layer"
    levers = "levers"
    all = "all"


def _table(title: str, rows: Sequence[NVFP4Row], bandwidth: float) -> Table:
    from kbit.bench.nvfp4 import CUBLAS

    base = {row.rows: row.us for row in rows if row.arm == CUBLAS}
    headers = ("rows", "arm", "us", "spread", "GB/s", "% read", "quantized", "copied", "vs bf16")
    table = text_table(title, headers, left=("arm",))
    for row in in_sections(table, rows, lambda row: row.rows):
        ratio = base[row.rows] / row.us if row.rows in base else None
        table.add_row(
            str(row.rows),
            row.arm,
            f"{row.us:.2f}",
            f"{100 * row.spread:.0f}%",
            f"{row.gb_s:.0f}",
            f"{100 * row.gb_s / bandwidth:.0f}",
            str(row.quantized_rows or ""),
            str(row.copied_rows or ""),
            "" if ratio is None else f"{ratio:.2f}",
            style="red" if ratio is not None and ratio < 1 else None,
        )
    return table


def nvfp4(
    part: Annotated[Part, typer.Option(help="What to measure; all but levers.")] = Part.all,
    shape: Annotated[str, typer.Option(help="Products: names of layer shapes.")] = "l8b,l70b,gateup,down",
    rows: Annotated[str, typer.Option("--rows", "-m", help="Products: numbers of tokens M.")] = (
        "1,2,4,8,16,32,64,256,4096"
    ),
    quantize_rows: Annotated[str, typer.Option(help="Quantizer: numbers of rows.")] = "1,32,512,2048,4096",
    batch: Annotated[str, typer.Option(help="Layer: numbers of tokens T.")] = "1,8,32,128,512,2048",
    routing: Annotated[str, typer.Option(help="Layer: uniform, zipf.")] = "uniform,zipf",
    accum: Annotated[str, typer.Option(help="Layer: contracts.")] = "tc,exact",
    repeats: Annotated[int, typer.Option(min=7, help="Timed replays of each arm.")] = 11,
    json_file: JsonFile = None,
) -> None:
    """W4A4 in NVFP4 against bf16 cuBLAS. And ways to quantize for experts; cold weights, graph replays."""
    from kbit.bench import gpu_timing, nvfp4_layer, nvfp4_levers, shapes
    from kbit.bench import nvfp4 as bench
    from kbit.bench.routings import ROUTINGS

    chosen = shapes.select(names("--shape", shape, [each.name for each in shapes.DENSE]))
    counts, quantized = numbers("--rows", rows), numbers("--quantize-rows", quantize_rows)
    batches = numbers("--batch", batch)
    routings = names("--routing", routing, ROUTINGS)
    accums = names("--accum", accum, bench.ACCUMULATIONS)
    gpu_timing.require_gpu("kbit bench nvfp4")
    runs: list[Iterator[NVFP4Row]] = []
    if part in (Part.quantize, Part.all):
        runs.append(bench.quantize_rows(quantized, repeats))
    if part in (Part.gemm, Part.all):
        runs += [bench.gemm_rows(each, counts, repeats) for each in chosen]
    if part in (Part.layer, Part.all):
        runs.append(nvfp4_layer.layer_rows(batches, routings, accums, repeats))
    if part is Part.levers:
        runs.append(nvfp4_levers.quantizer_rows(quantized, repeats))
        runs += [nvfp4_levers.product_rows(each, counts, repeats) for each in chosen]
    _run(runs, repeats, json_file)


def _run(runs: Sequence[Iterator[NVFP4Row]], repeats: int, file: Path | None) -> None:
    from kbit.bench import gpu_timing
    from kbit.bench import nvfp4 as bench

    result = gpu_timing.result_header(repeats) | {"dtype": "bf16"}
    measured: list[NVFP4Row] = []
    for run in runs:
        for row in run:
            measured.append(row)
            console.print(f"{row.part}, {row.problem}, {row.rows}: {row.arm} {row.us:.2f} us", markup=False)
            # At once, so that an interruption loses one row.
            write_json(file, result | {"rows": bench.as_json(measured)})
    for key in dict.fromkeys((row.part, row.problem) for row in measured):
        chosen = [row for row in measured if (row.part, row.problem) == key]
        show(_table(": ".join(key), chosen, result["read_bandwidth_gb_s"]))
