"""`kbit bench train`: a step of LoRA training on quantized weights against bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.model_arms import ArmBits, FirstLayers, ModelName, OneDevice, check_device, quantized_arms
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kbit.bench.train import ArmResult
    from kbit.format.policy import QuantizationPolicy

console = Console()


def _table(results: Sequence[ArmResult], tokens: int) -> Table:
    from kbit.bench.train import BASELINE

    base = next((result for result in results if result.name == BASELINE), None)
    headers = ("arm", "weights GB", "adapters MB", "peak GB", "ms/step", "spread", "tok/s", "vs bf16", "loss")
    table = text_table(f"LoRA, {tokens} tokens a step", headers, left=("arm",))
    for row in results:
        table.add_row(
            row.name,
            f"{row.weight_bytes / 1e9:.2f}",
            f"{row.adapter_bytes / 1e6:.1f}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.2f}",
            f"{row.ms:.1f}",
            f"{100 * row.spread:.0f}%",
            f"{1e3 * tokens / row.ms:.0f}",
            "" if base is None else f"{row.ms / base.ms:.2f}",
            f"{row.first_loss:.3f} -> {row.last_loss:.3f}",
        )
    return table


def train(
    name: ModelName,
    bits: ArmBits = "4",
    baseline: Annotated[bool, typer.Option(help="Measure bf16 too.")] = True,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 4096,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    experts: Annotated[bool, typer.Option(help="Adapt fused experts too.")] = True,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in the backward.")] = True,
    repeats: Annotated[int, typer.Option(min=7, help="Timed steps; the median counts.")] = 7,
    layers: FirstLayers = None,
    device: OneDevice = "cuda",
    json_file: JsonFile = None,
) -> None:
    """Time and peak memory of a LoRA step against bf16. Random weights."""
    import torch

    from kbit.bench import gpu_timing, model_build
    from kbit.bench import train as bench

    check_device("kbit bench train", device)
    plan = bench.Plan(sequences, tokens, rank, experts, checkpointing, repeats)
    policies: dict[str, QuantizationPolicy | None] = {bench.BASELINE: None} if baseline else {}
    policies |= quantized_arms(bits, search=False)  # random weights need no search
    config = model_build.load_config(name, layers)
    about = gpu_timing.describe(device)
    result = {"machine": about, "model": name, "layers": config.num_hidden_layers, "plan": vars(plan)}
    arms: list[ArmResult] = []
    try:
        with console.status(name) as status:
            for arm in bench.measure(config, plan, torch.device(device), policies, status.update):
                arms.append(arm)  # written at once: an interruption loses one arm
                write_json(json_file, result | {"arms": bench.as_json(arms)})
    finally:
        if arms:
            show(_table(arms, sequences * tokens))
