"""`kbit quantize`: a model folder in, a quantized model folder out."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

if TYPE_CHECKING:
    from kbit.format import QuantizationPolicy
    from kbit.integrations.streaming import Report

console = Console()


def parse_overrides(options: list[str]) -> dict[str, int]:
    """["REGEX=BITS", ...] -> {regex: bits}.

    Raises:
        ValueError: an option has no "=", or what follows it is not a number.
    """
    overrides = {}
    for option in options:
        pattern, separator, bits = option.rpartition("=")
        if not separator or not bits.isdigit():
            raise ValueError(f"--override takes REGEX=BITS, such as 'down_proj$=5', got {option!r}.")
        overrides[pattern] = int(bits)
    return overrides


def quantize(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Unquantized model folder.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    bits: Annotated[int, typer.Option(help="Bits per code, 2 to 5.")] = 4,
    override: Annotated[
        list[str] | None, typer.Option(metavar="REGEX=BITS", help="Other bits for matching modules; 0 skips.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Modules to leave unquantized, by name.")] = None,
    embedding_bits: Annotated[int | None, typer.Option(help="Quantize embeddings and head too.")] = None,
    codebook: Annotated[str, typer.Option(help="Name of a codebook.")] = "nf",
    absmax: Annotated[str, typer.Option(help="Block scales: e4m4, float16 or float32.")] = "e4m4",
    plain: Annotated[bool, typer.Option("--plain", help="Plain absmax scales instead of a search.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")] = False,
) -> None:
    """Quantize a model, shard by shard; run it again to go on after an interruption."""
    from kbit.format import QuantizationPolicy

    policy = QuantizationPolicy(
        bits=bits,
        codebook=codebook,
        absmax_format=absmax,
        search=not plain,
        overrides=parse_overrides(override or []),
        modules_to_not_convert=skip,
        embedding_bits=embedding_bits,
    )
    start = time.perf_counter()
    report = run(source, target, policy, force)
    _print_summary(report, target, time.perf_counter() - start)


def run(source: Path, target: Path, policy: QuantizationPolicy, force: bool = False) -> Report:
    """`quantize_checkpoint` with a progress bar."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task("reading headers", total=None)
        from kbit.integrations.streaming import quantize_checkpoint

        def show(done: int, total: int, name: str) -> None:
            bar.update(task, completed=done, total=total, description=f"quantizing to {policy.bits} bits")

        return quantize_checkpoint(source, target, policy, force, show)


def _print_summary(report: Report, target: Path, seconds: float) -> None:
    resumed = f", {report.resumed_shards} of them from before" if report.resumed_shards else ""
    console.print(
        f"{target}: {report.bytes_in / 1e6:.1f} MB -> {report.bytes_out / 1e6:.1f} MB in "
        f"{len(report.shards)} shards{resumed}"
    )
    share = report.quantized_weights / max(1, report.weights)
    console.print(
        f"{share:.1%} of {report.weights / 1e6:.1f} M weights at {report.bits_per_weight:.2f} bits; "
        f"{seconds:.1f} s, peak memory {peak_memory_mb():.0f} MB"
    )


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in millions of bytes."""
    status = Path("/proc/self/status")
    # Linux counts into ru_maxrss what the process that started this one had resident.
    peak = re.search(r"VmHWM:\s*(\d+) kB", status.read_text()) if status.is_file() else None
    if peak is not None:
        return int(peak[1]) * 1024 / 1e6
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
