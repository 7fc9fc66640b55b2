"""`kbit bench quantize`: weights per second from disk to disk."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from kbit.bench.text_table import text_table
from kbit.cli.consoles import Console
from kbit.cli.options import numbers, words
from kbit.cli.outputs import JsonFile, check_folder, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kbit.bench.quantize import Run

console = Console()


def _table(runs: Sequence[Run]) -> Table:
    sizes = ("quantized", "copied", "in GB", "out GB")
    headers = ("jobs", "devices", *sizes, "s", "M weights/s", "80 B weights, min")
    table = text_table("quantizing a checkpoint, from disk to disk", headers, left=("devices",))
    for run in runs:
        table.add_row(
            str(run.jobs),
            ", ".join(run.devices),
            f"{run.quantized_weights / 1e9:.2f} B",
            f"{run.copied / 1e9:.2f} B",
            f"{run.bytes_in / 1e9:.2f}",
            f"{run.bytes_out / 1e9:.2f}",
            f"{run.seconds:.1f}",
            f"{run.weights_per_second / 1e6:.0f}",
            f"{run.seconds_for_80b / 60:.1f}",
        )
    return table


def quantize(
    name: Annotated[str, typer.Argument(help="A shipped model, such as llama-3-8b, or a config.json.")],
    layers: Annotated[int | None, typer.Option(min=1, help="Only the first layers.")] = None,
    bits: Annotated[int, typer.Option(help="Bits per weight, 2 to 5; scales add 0.25.")] = 4,
    plain: Annotated[bool, typer.Option("--plain", help="Plain absmax scales instead of a search.")] = False,
    jobs: Annotated[
        str, typer.Option(help="Shards in work at a time; one run each. Default: 1, 2 and 4 for each device.")
    ] = "",
    device: Annotated[str, typer.Option(help="Where to quantize: cpu, cuda, or cuda:0,cuda:1.")] = "cuda",
    folder: Annotated[
        Path | None,
        typer.Option(
            callback=check_folder,
            help="Folder on the disk to measure, with room for the model; default: temporary.",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Weights per second from disk to disk. On a checkpoint of random weights, written first."""
    from kbit.bench import gpu_timing
    from kbit.bench import quantize as bench
    from kbit.cli.model_folder import bars_on_terminals_only
    from kbit.format.policy import QuantizationPolicy
    from kbit.integrations.streaming.workers import worker_devices

    devices = words(device)
    counts = numbers("--jobs", jobs) if jobs else [each * len(devices) for each in (1, 2, 4)]
    gpus = [one for one in devices if one.startswith("cuda")]
    if gpus:
        gpu_timing.require_gpu("kbit bench quantize", or_cpu=True)
    for count in counts:  # before a model is written
        worker_devices(devices, count)
    bars_on_terminals_only()
    about = gpu_timing.describe(gpus[0] if gpus else "cpu")
    policy = QuantizationPolicy(bits=bits, search=not plain)
    result = {"machine": about, "model": name, "layers": layers, "policy": policy.to_dict()}
    runs: list[Run] = []
    try:
        with console.status(name) as status, tempfile.TemporaryDirectory(prefix="kbit-", dir=folder) as place:
            for run in bench.measure(name, layers, policy, counts, devices, Path(place), status.update):
                runs.append(run)  # written at once: an interruption loses one run
                write_json(json_file, result | {"runs": bench.as_json(runs)})
    finally:
        if runs:
            show(_table(runs))
