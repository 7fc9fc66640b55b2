"""`kbit bench serve`: throughput, latency and memory of served models under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from kbit.cli.options import numbers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kbit.bench.serve import Level

console = Console()


def _table(results: Mapping[str, Sequence[Level]]) -> Table:
    table = Table(title="chat completions on loopback")
    headers = ("clients", "model", "requests", "errors", "tok/s", "p50 s", "p95 s", "resident MB", "GPU GB")
    for header in headers:
        table.add_column(header, justify="left" if header == "model" else "right")
    rows = [(level.clients, name, level) for name, levels in results.items() for level in levels]
    for clients, name, level in sorted(rows, key=lambda row: row[0]):
        table.add_row(
            str(clients),
            name,
            str(level.requests),
            str(len(level.errors)),
            f"{level.tokens_per_second:.1f}",
            f"{level.percentile(50):.2f}",
            f"{level.percentile(95):.2f}",
            "" if level.resident_bytes is None else f"{level.resident_bytes / 1e6:.0f}",
            "" if level.device_bytes is None else f"{level.device_bytes / 1e9:.1f}",
            style="red" if level.errors else None,
        )
    return table


def serve(
    models: Annotated[
        list[Path], typer.Argument(help="Model folders, quantized or not; one after the other.")
    ],
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients.")] = "1,8,32",
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client at each level.")] = 4,
    prompt_words: Annotated[int, typer.Option(min=4, help="Words of a prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    continuous_batching: Annotated[
        bool, typer.Option(help="Answer requests together, from a paged cache.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cuda:0 or cpu.")] = "auto",
    option: Annotated[
        list[str] | None, typer.Option(help="More of transformers serve, such as --cb-block-size=256.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the results here.")] = None,
) -> None:
    """Load test of `transformers serve`: throughput, latency, errors and memory."""
    from kbit.bench import machine
    from kbit.bench import serve as bench

    plan = bench.Plan(numbers("--clients", clients), requests, prompt_words, new_tokens)
    options = ["--device", device, *(option or [])]
    if continuous_batching:
        options.append("--continuous-batching")
    results: dict[str, list[Level]] = {}
    with console.status("") as status:
        for folder in models:
            status.update(f"{folder.name}: starting")
            with bench.server(folder.resolve(), options) as (port, pid):
                status.update(f"{folder.name}: serving")
                results[folder.name] = bench.load(port, pid, str(folder.resolve()), plan)
    Console(width=120).print(_table(results))
    if json_file is not None:
        rows = {name: bench.as_json(levels) for name, levels in results.items()}
        result = {"machine": machine.describe(), "plan": vars(plan), "options": options, "models": rows}
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    failed = sum(len(level.errors) for levels in results.values() for level in levels)
    if failed:
        first = next(error for levels in results.values() for level in levels for error in level.errors)
        raise OSError(f"{failed} requests failed, the first with: {first}")


def register(app: typer.Typer) -> None:
    """Add this command to `kbit bench`."""
    app.command()(serve)
