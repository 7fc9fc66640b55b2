"""`kbit bench`: measurements, as tables and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from kbit.cli import (
    bench_kernels,
    bench_model,
    bench_nvfp4,
    bench_quantize,
    bench_report,
    bench_serve,
    bench_train,
    bench_workload,
)
from kbit.cli.options import labels, names, numbers
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.cpu import LinearRow, QuantizeRow

app = typer.Typer(help="Measure kernels and models.", no_args_is_help=True, rich_markup_mode=None)
bench_kernels.register(app)
bench_workload.register(app)
bench_model.register(app)
bench_nvfp4.register(app)
bench_report.register(app)
bench_train.register(app)
bench_quantize.register(app)
bench_serve.register(app)
console = Console()

Threads = Annotated[int, typer.Option(min=1, max=1024, help="Threads, for kbit and torch alike.")]


@app.command()
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
    from kbit.bench import machine, timing
    from kbit.format import SUPPORTED_BITS

    shapes = shape or list(bench.SHAPES)
    unknown = set(shapes) - set(bench.SHAPES)
    if unknown:
        raise ValueError(f"bench cpu: unknown shapes {sorted(unknown)}; known: {list(bench.SHAPES)}.")
    counts = numbers("--rows", rows)
    widths = [int(width) for width in names("--bits", bits, [str(width) for width in SUPPORTED_BITS])]
    torch.set_num_threads(threads)
    bandwidth = timing.read_bandwidth()
    about = machine.describe()
    head = {"machine": about, "read_bandwidth_gb_s": round(bandwidth, 2)}
    linear: list[LinearRow] = []
    quantize: list[QuantizeRow] = []

    def save() -> None:
        write_json(json_file, head | {"linear": bench.as_json(linear), "quantize": bench.as_json(quantize)})

    for name in track(shapes, description="linear", console=console):
        linear += bench.linear_rows(name, counts, widths, repeats)
        save()  # so that an interruption loses one shape
    if quantizers:
        quantize += track(bench.quantize_rows(), description="quantize", console=console)
        save()
    console.print(f"{about['cpu']}, {threads} threads, {bandwidth:.1f} GB/s read bandwidth")
    for name in shapes:
        show(_linear_table([row for row in linear if row.shape == name], bandwidth))
    if quantize:
        show(_quantize_table(quantize))


def _linear_table(rows: list[LinearRow], bandwidth: float) -> Table:
    first = rows[0]
    table = Table(title=f"{first.shape}: {first.in_features} -> {first.out_features}, bfloat16 activations")
    for header in ("M", "kernel", "k", "ms", "spread", "GB/s", "% read", "vs bf16", "vs f32"):
        table.add_column(header, justify="left" if header == "kernel" else "right")
    previous = first.rows
    for row in rows:
        if row.rows != previous:
            table.add_section()
            previous = row.rows
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
    table = Table(title="quantize, million weights a second")
    for header in ("kernel", "k", "plain", "search"):
        table.add_column(header, justify="left" if header == "kernel" else "right")
    speeds = {(row.isa, row.bits, row.search): row.million_weights_s for row in rows}
    for isa, bits in dict.fromkeys((row.isa, row.bits) for row in rows):
        plain, search = (f"{speeds[isa, bits, searched]:.0f}" for searched in (False, True))
        table.add_row(isa, str(bits), plain, search)
    return table


@app.command()
def decode(
    models: Annotated[list[Path], typer.Argument(help="Model folders, quantized or not.")],
    threads: Threads = 2,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt, timed as prefill.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer, timed as decode.")] = 64,
    json_file: JsonFile = None,
) -> None:
    """Tokens per second of model folders. One greedy loop; ratios are to the first."""
    import torch

    from kbit.bench import machine
    from kbit.bench.decode import DecodeSpeed, tokens_per_second
    from kbit.cli.model_folder import check_model_folder, load_model

    torch.set_num_threads(threads)
    for folder in models:
        check_model_folder(folder)
    about, speeds = machine.describe(), dict[str, DecodeSpeed]()
    for name, folder in track(labels(models).items(), description="decode", console=console):
        model = load_model(folder)
        prompt = torch.arange(prompt_tokens)[None] % model.config.get_text_config().vocab_size
        speeds[name] = tokens_per_second(model, prompt, new_tokens)
        del model
        rows = {each: vars(speed) for each, speed in speeds.items()}
        write_json(json_file, {"machine": about, "decode": rows})
    base = next(iter(speeds.values())).decode_tokens_s
    table = Table(title=f"one stream, {prompt_tokens} prompt and {new_tokens} new tokens, {threads} threads")
    for header in ("model", "prefill tok/s", "decode tok/s", "vs first"):
        table.add_column(header, justify="left" if header == "model" else "right")
    for name, speed in speeds.items():
        ratio = f"{speed.decode_tokens_s / base:.2f}"
        table.add_row(escape(name), f"{speed.prefill_tokens_s:.0f}", f"{speed.decode_tokens_s:.1f}", ratio)
    show(table)
