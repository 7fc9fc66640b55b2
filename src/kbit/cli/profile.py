"""`kbit profile`: where one decode step of a model goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.hub import folder_of, model_name
from kbit.cli.model_folder import load_model
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from kbit.bench.profile import Part

console = Console()
_NAME = 70  # characters of a kernel's name; templates have thousands


def profile(
    folder: Annotated[
        Path, typer.Argument(help="Model, quantized or not: a folder, or ORG/MODEL on the hub.")
    ],
    device: Annotated[str, typer.Option(help="cuda or cpu; by default the GPU where there is one.")] = "",
    dtype: Annotated[
        str, typer.Option(help="auto (the model's own), float32, float16 or bfloat16.")
    ] = "auto",
    batch: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 1,
    context: Annotated[int, typer.Option(min=1, help="Tokens of each in the cache before the step.")] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps to average over.")] = 16,
    graph: Annotated[bool, typer.Option(help="Replay the step as a CUDA graph where it can be.")] = True,
    top: Annotated[int, typer.Option(min=1, help="Kernels to list.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Where one decode step goes. Share and calls of each kernel, device busy, ceiling of removing each."""
    import torch

    from kbit.bench import gpu_timing
    from kbit.bench import profile as bench

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        gpu_timing.require_gpu("kbit profile --device cuda", or_cpu=True)
    folder = folder_of(folder)
    model = load_model(folder, dtype, device)
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)  # a CUDA graph records what runs on the current one
    found = bench.profile_step(model, batch, context, steps, graph)
    how = "CUDA graph" if found.reason is None else f"no CUDA graph: {found.reason}"
    console.print(
        f"{model_name(folder)}, batch {batch}, context {context}: {found.step_us:.1f} us a step, "
        f"{found.device} busy {100 * found.busy:.1f}% ({how})",
        markup=False,
        soft_wrap=True,
    )
    show(_table("levers, by purpose", found.groups))
    show(_table(f"the {min(top, len(found.kernels))} slowest kernels", found.kernels[:top]))
    about = gpu_timing.describe(found.device)
    write_json(json_file, {"machine": about, "profile": bench.as_json(found, model_name(folder))})


def _table(title: str, parts: Sequence[Part]) -> Table:
    headers = ("kernel", "calls", "us", "% of step", "step without, us", "at most")
    table = text_table(title, headers, left=("kernel",))
    for part in parts:
        name = part.kernel if len(part.kernel) <= _NAME else f"{part.kernel[:_NAME]}..."
        times = (f"{part.us:.1f}", f"{100 * part.share:.1f}", f"{part.step_without_us:.1f}")
        table.add_row(escape(name), f"{part.calls:g}", *times, f"{part.ceiling:.2f}x")
    return table
