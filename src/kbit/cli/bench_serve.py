"""`kbit bench serve`: throughput, latency and memory of served models under load."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.model_folder import load_tokenizer
from kbit.cli.options import labels, numbers
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.serve_requests import NO_TEMPLATE
from kbit.cli.tables import show
from kbit.format.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kbit.bench.serve import Level, Plan

console = Console()


def _table(results: Mapping[str, Sequence[Level]]) -> Table:
    headers = ("clients", "model", "requests", "errors", "tok/s", "p50 s", "p95 s", "resident MB", "GPU GB")
    table = text_table("chat completions on loopback", headers, left=("model",))
    rows = [(level.clients, name, level) for name, levels in results.items() for level in levels]
    for clients, name, level in sorted(rows, key=lambda row: row[0]):
        table.add_row(
            str(clients),
            escape(name),
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


def _random(name: str, layers: int | None, folder: Path, bits: int, device: str) -> list[Path]:
    """Folders of a model with random weights, in bf16 and quantized."""
    import torch

    from kbit.bench import random_models
    from kbit.cli.model_folder import bars_on_terminals_only
    from kbit.format.policy import QuantizationPolicy

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    bars_on_terminals_only()
    policy = QuantizationPolicy(bits=bits, search=False)  # random weights need none
    return random_models.write_pair(name, layers, folder, policy, torch.device(device))


def serve(
    models: Annotated[
        list[Path] | None, typer.Argument(help="Model folders, quantized or not; one after the other.")
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Serve a shipped model with random weights, in bf16 and quantized."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --random: only the first layers.")] = None,
    bits: Annotated[int, typer.Option(help="With --random: bits per weight.")] = 4,
    clients: Annotated[str, typer.Option(help="Numbers of concurrent clients.")] = "1,8,32",
    requests: Annotated[
        int, typer.Option(min=1, help="Requests of each client at each level, after an untimed one.")
    ] = 4,
    prompt_words: Annotated[int, typer.Option(min=4, help="Words of a prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 64,
    continuous_batching: Annotated[
        bool, typer.Option(help="Answer requests together, from a paged cache.")
    ] = True,
    device: Annotated[str, typer.Option(help="Where to run: auto, cuda:0 or cpu.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a server to start, or to answer.")] = 600,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            metavar="OPTION",
            help="Option of `transformers serve`, such as --cb-block-size=256; repeatable.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Load test of a served model. Throughput, latency, errors and memory of `transformers serve`."""
    from kbit.bench import serve as bench
    from kbit.cli.serve import check_packages

    if (models is None) == (random is None):
        raise ValueError("bench serve takes model folders, or --random and a model's name.")
    check_packages()
    for folder in models or ():
        _check_template(folder)
    plan = bench.Plan(numbers("--clients", clients), requests, prompt_words, new_tokens, timeout)
    options = ["--device", device, *(option or [])]
    if continuous_batching:
        options.append("--continuous-batching")
    results: dict[str, list[Level]] = {}
    try:
        with tempfile.TemporaryDirectory(prefix="kbit-") as place:
            if random is not None:
                with console.status(escape(f"{random}: random weights")):
                    models = _random(random, layers, Path(place), bits, device)
            _measure(labels(models or ()), plan, options, results, json_file)
    finally:
        if any(results.values()):
            show(_table(results))
    errors = [error for levels in results.values() for level in levels for error in level.errors]
    if errors:
        raise OSError(f"{counted(len(errors), 'request')} failed, the first with: {errors[0]}")


def _check_template(folder: Path) -> None:
    """Raises OSError or ValueError, before a server is started, for a model that cannot be chatted with."""
    if not load_tokenizer(folder).chat_template:
        raise ValueError(f"{folder}: its {NO_TEMPLATE}.")


def _measure(
    models: Mapping[str, Path],
    plan: Plan,
    options: Sequence[str],
    results: dict[str, list[Level]],
    json_file: Path | None,
) -> None:
    """Fill `results` level by level, and write them as often: an interruption loses one level."""
    from kbit.bench import serve as bench

    for name, folder in models.items():
        with (
            console.status(f"{escape(name)}: starting") as status,
            bench.server(folder.resolve(), options, plan.timeout) as (port, pid),
        ):
            status.update(f"{escape(name)}: {plan.clients[0]} clients")
            levels = results.setdefault(name, [])
            for level in bench.load(port, pid, str(folder.resolve()), plan):
                levels.append(level)
                rows = {each: bench.as_json(found) for each, found in results.items()}
                about = {"machine": _machine("cpu" in options), "plan": vars(plan), "options": options}
                write_json(json_file, about | {"models": rows})
                status.update(f"{escape(name)}: {level.clients} clients done")


@functools.cache
def _machine(on_cpu: bool) -> dict[str, Any]:
    """Asked for once a server runs: a CUDA context of our own would take memory that the server counts."""
    import torch

    from kbit.bench import gpu_timing

    return gpu_timing.describe("cpu" if on_cpu or not torch.cuda.is_available() else "cuda")
