"""`kbit bench generate`: tokens a second of `model.generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from kbit.bench.result_files import as_json
from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.model_arms import ArmBits, FirstLayers, ModelName, OneDevice, all_arms, check_device
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kbit.bench.generate import Row

console = Console()


def _show(name: str, rows: Sequence[Row]) -> None:
    headers = ("arm", "way", "tok/s", "first token s", "first call s", "without graphs")
    table = text_table(f"generate, {name}", headers, left=("arm", "way", "without graphs"), overflow="fold")
    for row in rows:
        speed = "" if row.tokens_s is None else f"{row.tokens_s:.1f}"
        seconds = (f"{row.first_token_s:.2f}", f"{row.first_call_s:.1f}")
        table.add_row(row.arm, row.way, speed, *seconds, escape(row.reason or ""))
    show(table)


def generate(
    name: ModelName,
    bits: ArmBits = "4",
    baseline: Annotated[bool, typer.Option(help="Measure bf16 too.")] = True,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 64,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the answer.")] = 128,
    layers: FirstLayers = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Measure compiled layers, too.")] = False,
    device: OneDevice = "cuda",
    json_file: JsonFile = None,
) -> None:
    """Tokens a second of model.generate. As it is and from CUDA graphs; random weights, one sequence."""
    import torch

    from kbit.bench import generate as bench
    from kbit.bench import gpu_timing, model_build
    from kbit.integrations.transformers.compiled_layers import overlap_kernels

    check_device("kbit bench generate", device)
    if compiled:
        overlap_kernels()
    config = model_build.load_config(name, layers)
    found = {"machine": gpu_timing.describe(device), "model": name, "layers": config.num_hidden_layers}
    found |= {"plan": {"prompt": prompt, "new_tokens": new_tokens}}
    policies = all_arms(bits, baseline)
    rows: list[Row] = []
    with console.status(name) as status:
        arms = bench.measure(
            config, torch.device(device), policies, prompt, new_tokens, compiled, status.update
        )
        try:
            for row in arms:
                rows.append(row)  # written at once: an interruption loses one
                write_json(json_file, found | {"rows": as_json(rows)})
        finally:
            status.stop()
            if rows:
                _show(name, rows)
