"""`kbit bench cpu`: CPU kernels against torch, and the quantizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kbit.bench.result_files import as_json
from kbit.bench.text_table import in_sections, text_table
from kbit.cli.consoles import Console, tracked
from kbit.cli.options import Threads, numbers, widths
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.cpu import LinearRow, QuantizeRow

console = Console()


def cpu(
    threads: Threads = 2,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this shape, such as 'llama-8b up'; repeatable."),
    ] = None,
    rows: Annotated[str, typer.Option("--rows", "-m", help="Numbers of tokens M.")] = "1,16,64,256",
    bits: Annotated[str, typer.Option(help="Bits per weight, such as 2,4.")] = "2,3,4,5",
    repeats: Annotated[int, typer.Option(min=7, help="Timed calls of each arm.")] = 9,
    quantizers: Annotated[bool, typer.Option(help="Also measure quantizing.")] = True,
    json_file: JsonFile = None,
) -> None:
    """CPU kernels against torch's 16- and 32-bit linear. Cold weights, same run."""
    import torch

    from kbit.bench import cpu as bench
    from kbit.bench import cpu_timing, machine

    shapes = shape or list(bench.SHAPES)
    unknown = set(shapes) - set(bench.SHAPES)
    if unknown:
        raise ValueError(f"bench cpu: unknown shapes {sorted(unknown)}; known: {list(bench.SHAPES)}.")
    counts = numbers("--rows", rows)
    chosen = widths(bits)
    torch.set_num_threads(threads)
    bandwidth = cpu_timing.read_bandwidth()
    about = machine.describe()
    head = {"machine": about, "read_bandwidth_gb_s": round(bandwidth, 2)}
    linear: list[LinearRow] = []
    quantize: list[QuantizeRow] = []

    def save() -> None:
        write_json(json_file, head | {"linear": as_json(linear), "quantize": as_json(quantize)})

    for name in tracked(shapes, "linear"):
        linear += bench.linear_rows(name, counts, chosen, repeats)
        save()  # so that an interruption loses one shape
    if quantizers:
        quantize += tracked(bench.quantize_rows(), "quantize")
        save()
    console.print(f"{about['cpu']}, {threads} threads, {bandwidth:.1f} GB/s read bandwidth")
    for name in shapes:
        show(_linear_table([row for row in linear if row.shape == name], bandwidth))
    if quantize:
        show(_quantize_table(quantize))


def _linear_table(rows: list[LinearRow], bandwidth: float) -> Table:
    first = rows[0]
    title = f"{first.shape}: {first.in_features} -> {first.out_features}, bfloat16 activations"
    headers = ("M", "kernel", "k", "ms", "spread", "GB/s", "% read", "vs bf16", "vs f32")
    table = text_table(title, headers, left=("kernel",))
    for row in in_sections(table, rows, lambda row: row.rows):
        table.add_row(
            str(row.rows),
            row.kernel,
            str(row.bits or ""),
            f"{row.ms:.3f}",
            f"{100 * row.spread:.0f}%",
            f"{row.weight_gb_s:.1f}",
            f"{100 * row.weight_gb_s / bandwidth:.0f}",
            f"{row.vs_bfloat16:.2f}",
            f"{row.vs_float32:.2f}",
            style=None if row.vs_bfloat16 >= 1 else "red",
        )
    return table


def _quantize_table(rows: list[QuantizeRow]) -> Table:
    headers = ("kernel", "k", "plain", "search")
    table = text_table("quantize, million weights a second", headers, left=("kernel",))
    speeds = {(row.isa, row.bits, row.search): row.million_weights_s for row in rows}
    for isa, bits in dict.fromkeys((row.isa, row.bits) for row in rows):
        plain, search = (f"{speeds[isa, bits, searched]:.0f}" for searched in (False, True))
        table.add_row(isa, str(bits), plain, search)
    return table
