"""`kbit profile`: where one decode step of a model goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.hub import folder_of, model_name
from kbit.cli.model_arms import all_arms
from kbit.cli.model_folder import DTYPE_HELP, load_model
from kbit.cli.options import numbers
from kbit.cli.outputs import JsonFile, write_json
from kbit.cli.tables import show
from kbit.cli.texts import check_positions

if TYPE_CHECKING:
    from kbit.bench.profile import Part, StepProfile

console = Console()
_NAME = 70  # characters of a kernel's name; templates have thousands


def profile(
    folder: Annotated[
        Path | None, typer.Argument(help="Model, quantized or not: a folder, or ORG/MODEL on the hub.")
    ] = None,
    random: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A shipped model or config.json, with random weights, instead of FOLDER."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="With --random: only the first layers.")] = None,
    bits: Annotated[str, typer.Option(help="With --random: bits per weight; one profile each.")] = "4",
    baseline: Annotated[bool, typer.Option("--baseline", help="With --random: profile bf16, too.")] = False,
    device: Annotated[
        str, typer.Option(help="Where to run: cuda or cpu; by default the GPU where there is one.")
    ] = "",
    dtype: Annotated[str, typer.Option(help=f"With FOLDER, what layers compute in: {DTYPE_HELP}.")] = "auto",
    batch: Annotated[str, typer.Option(help="Sequences decoded at once; one profile each.")] = "1",
    context: Annotated[
        int, typer.Option(min=1, help="Tokens of each sequence in the cache before the step.")
    ] = 128,
    steps: Annotated[int, typer.Option(min=1, help="Steps to average over.")] = 16,
    graph: Annotated[bool, typer.Option(help="Replay the step as a CUDA graph where it can be.")] = True,
    top: Annotated[int, typer.Option(min=1, help="Kernels to list.")] = 20,
    json_file: JsonFile = None,
) -> None:
    """Where one decode step goes. Share and calls of each kernel, device busy, ceiling of removing each."""
    import torch

    from kbit.bench import gpu_timing
    from kbit.bench import profile as bench
    from kbit.bench.model import ways
    from kbit.bench.model_decode import positions

    if (folder is None) == (random is None):
        raise ValueError("profile takes a model's folder, or --random and a model's name.")
    batches = numbers("--batch", batch)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda"):
        gpu_timing.require_gpu("kbit profile --device cuda", or_cpu=True)
    models = (
        _loaded(folder, dtype, device) if folder else _built(random or "", layers, bits, baseline, device)
    )
    profiles: list[dict[str, Any]] = []
    for name, arm, model in models:
        check_positions(model, positions(context, steps), f"{name}: --context {context} with --steps {steps}")
        if model.device.type == "cuda":
            torch.cuda.set_device(model.device)  # a CUDA graph records what runs on the current one
        for count in batches:
            for way in ways(model, arm, count) if arm else ("",):
                what = f"{name}, {way}" if way else name
                try:
                    found = bench.profile_step(model, count, context, steps, graph)
                except torch.OutOfMemoryError:
                    if not arm:
                        raise
                    console.print(f"{what}, batch {count}: out of memory, left out", style="red")
                    torch.cuda.empty_cache()
                    continue
                profiles.append(bench.as_json(found, name, way))
                # At once, so that an interruption loses one profile.
                write_json(json_file, {"machine": gpu_timing.describe(found.device), "profiles": profiles})
                _print(what, found, top)
        del model


def _loaded(folder: Path, dtype: str, device: str) -> Iterator[tuple[str, str, Any]]:
    """(name, arm, model) of a folder, or of one on the hub."""
    folder = folder_of(folder)
    yield model_name(folder), "", load_model(folder, dtype, device)


def _built(
    name: str, layers: int | None, bits: str, baseline: bool, device: str
) -> Iterator[tuple[str, str, Any]]:
    """(name, arm, model) of random weights, built when its turn comes."""
    import torch

    from kbit.bench import model_build

    arms, config = all_arms(bits, baseline), model_build.load_config(name, layers)
    place = torch.device(device)
    for arm, policy in arms.items():
        with model_build.freeing(place):
            yield Path(name).stem, arm, model_build.build(config, place, policy=policy).model


def _print(what: str, found: StepProfile, top: int) -> None:
    how = "CUDA graph" if found.reason is None else f"no CUDA graph: {found.reason}"
    console.print(
        f"{what}, batch {found.batch}, context {found.context}: {found.step_us:.1f} us a step, "
        f"{found.device} busy {100 * found.busy:.1f}% ({how})",
        markup=False,
        soft_wrap=True,
    )
    show(_table("levers, by purpose", found.groups))
    show(_table(f"the {min(top, len(found.kernels))} slowest kernels", found.kernels[:top]))


def _table(title: str, parts: Sequence[Part]) -> Table:
    headers = ("kernel", "calls", "us", "% of step", "step without, us", "at most")
    table = text_table(title, headers, left=("kernel",))
    for part in parts:
        name = part.kernel if len(part.kernel) <= _NAME else f"{part.kernel[:_NAME]}..."
        times = (f"{part.us:.1f}", f"{100 * part.share:.1f}", f"{part.step_without_us:.1f}")
        table.add_row(escape(name), f"{part.calls:g}", *times, f"{part.ceiling:.2f}x")
    return table
