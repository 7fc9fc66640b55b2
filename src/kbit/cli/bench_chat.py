"""`kbit bench chat`: the wait for an answer's first token, turn by turn, with and without prefix caching."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kbit.bench.result_files import as_json
from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.model_arms import ArmBits, FirstLayers, ModelName, OneDevice, all_arms, check_device
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kbit.bench.chat import Row

console = Console()


def _show(name: str, rows: Sequence[Row]) -> None:
    headers = ("arm", "way", "turn", "prompt", "first token ms", "tok/s")
    table = text_table(f"chat, {name}", headers, left=("arm", "way"))
    for row in rows:
        speed = "" if row.tokens_s is None else f"{row.tokens_s:.1f}"
        table.add_row(
            row.arm, row.way, str(row.turn), str(row.prompt), f"{1e3 * row.first_token_s:.1f}", speed
        )
    show(table)


def chat(
    name: ModelName,
    bits: ArmBits = "4",
    baseline: Annotated[bool, typer.Option(help="Measure bf16 too.")] = True,
    turns: Annotated[int, typer.Option(min=1, help="Prompts, each with an answer.")] = 4,
    first: Annotated[int, typer.Option(min=1, help="Tokens of the first prompt.")] = 6144,
    message: Annotated[int, typer.Option(min=1, help="Tokens that later prompts add.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 64,
    layers: FirstLayers = None,
    device: OneDevice = "cuda",
    json_file: JsonFile = None,
) -> None:
    """Waits for first tokens in a chat. With and without prefix caching; random weights, one chat."""
    import torch

    from kbit.bench import chat as bench
    from kbit.bench import gpu_timing, model_build

    check_device("kbit bench chat", device)
    config = model_build.load_config(name, layers)
    plan = bench.Plan(turns, first, message, new_tokens)
    found = {"machine": gpu_timing.describe(device), "model": name, "layers": config.num_hidden_layers}
    found |= {"plan": asdict(plan)}
    policies = all_arms(bits, baseline)
    rows: list[Row] = []
    with console.status(name) as status:
        try:
            for row in bench.measure(config, torch.device(device), policies, plan, status.update):
                rows.append(row)  # written at once: an interruption loses one
                write_json(json_file, found | {"rows": as_json(rows)})
        finally:
            status.stop()
            if rows:
                _show(name, rows)
