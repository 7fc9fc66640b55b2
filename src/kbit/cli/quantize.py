"""`kbit quantize`: a model folder in, a quantized model folder out."""

from __future__ import annotations

import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from kbit.cli.consoles import Console, warn
from kbit.cli.hub import folder_of, model_name
from kbit.cli.model_folder import TOKENIZER_REMEDY, has_tokenizer
from kbit.cli.options import in_options, long_dtype, words
from kbit.cli.outputs import check_file, write_json
from kbit.cli.texts import read_text
from kbit.format.words import counted, first_of

if TYPE_CHECKING:
    from kbit.format import QuantizationPolicy
    from kbit.integrations.streaming import Codes, Report

console = Console()
# What is left unquantized is worth a line from here on.
_LARGE_BYTES = 2**20


def parse_overrides(options: list[str]) -> dict[str, int]:
    """["REGEX=BITS", ...] -> {regex: bits}.

    Raises:
        ValueError: an option has no "=", nothing in front of it or no number behind, or a regex stands twice.
    """
    overrides: dict[str, int] = {}
    for option in options:
        pattern, separator, bits = option.rpartition("=")
        if not separator or not pattern or not bits.isdecimal():
            raise ValueError(f"--override takes REGEX=BITS, such as 'down_proj$=5', got {option!r}.")
        if pattern in overrides:
            raise ValueError(f"--override names {pattern!r} twice. Keep one of the two.")
        overrides[pattern] = int(bits)
    return overrides


def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Unquantized model: a folder, or ORG/MODEL on the hub.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    bits: Annotated[int, typer.Option(help="Bits per weight, 2 to 5; scales add 0.25.")] = 4,
    override: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REGEX=BITS", help="Other bits for modules whose name matches, 0 for none; repeatable."
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Leave this module, and all inside it, unquantized; repeatable."),
    ] = None,
    embedding_bits: Annotated[
        int | None, typer.Option(help="Quantize embeddings and output head too, to so many bits.")
    ] = None,
    codebook: Annotated[
        str,
        typer.Option(
            help="Levels that codes stand for: nf (normal-float), bof (block-wise optimal float), or a JSON "
            "file of them."
        ),
    ] = "nf",
    absmax: Annotated[
        str,
        typer.Option(
            help="Format of block scales: e4m4 (a byte), float16 (or fp16) or float32 (larger, slow)."
        ),
    ] = "e4m4",
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Take each block's largest weight as its scale, without a search: faster, less exact.",
        ),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="TEXT",
            help="Go by what this UTF-8 text feeds layers, too: more exact; needs memory for the model.",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUT, and the OUT.partial of a run with other options.")
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Shards in work at a time; default 1, or 2 for each GPU."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to quantize: cpu, cuda, or cuda:0,cuda:1.")] = "cpu",
    json_file: Annotated[
        Path | None, typer.Option("--json", callback=check_file, help="Also write the summary here.")
    ] = None,
) -> None:
    """Quantize a model, shard by shard. Run it again to go on after an interruption."""
    from kbit.cli.calibrate import calibrated
    from kbit.cli.codebooks import parse_codebook
    from kbit.format import QuantizationPolicy
    from kbit.integrations.streaming.workers import worker_devices

    policy = QuantizationPolicy(
        bits=bits,
        codebook=parse_codebook(codebook),
        absmax_format=long_dtype(absmax),
        search=not plain,
        overrides=parse_overrides(override or []),
        modules_to_not_convert=skip,
        embedding_bits=embedding_bits,
    )
    _check_json(json_file, target)
    # Before anything is fetched.
    worker_devices(words(device), jobs)
    text = None if calibrate is None else read_text(calibrate, "--calibrate")
    source, codes = folder_of(source), None
    if calibrate is not None and text is not None:
        codes = calibrated(source, policy, text, calibrate, device)
    report = run(source, target, policy, force, jobs, device, codes)
    _print_summary(report, target)
    if json_file is not None:
        by = None if calibrate is None else calibrate.name
        write_json(json_file, _summary(report, source, policy) | {"calibrated_by": by})


def _check_json(file: Path | None, target: Path) -> None:
    """Raise ValueError for a file in the place of a folder that is written."""
    from kbit.integrations.streaming.folder import partial_of

    if file is None:
        return
    place, partial = file.resolve(), partial_of(target.absolute()).resolve()
    if place in (target.resolve(), partial) or place.parent == partial:
        raise ValueError(f"--json: {file} is where {target} is written. Name another place.")


def run(
    source: Path,
    target: Path,
    policy: QuantizationPolicy,
    force: bool = False,
    jobs: int | None = None,
    device: str = "cpu",
    codes: Codes | None = None,
) -> Report:
    """`quantize_checkpoint` with a progress bar; `device` may be several, parted by commas."""
    from kbit.integrations.streaming import quantize_checkpoint
    from kbit.integrations.streaming.folder import finished_shards, partial_of

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), SpeedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    task = bar.add_task(f"quantizing to {policy.bits} bits", total=None)
    with warnings.catch_warnings(), ExitStack() as shown:
        warnings.showwarning = _print_warning

        def show(done: int, total: int, name: str) -> None:
            # Not before: what is wrong with a folder or an option is an error with nothing above it.
            if bar.console.is_terminal and not bar.live.is_started:
                shown.enter_context(bar)
            bar.update(task, completed=done, total=total)

        try:
            return quantize_checkpoint(source, target, policy, force, show, jobs, words(device), codes)
        except KeyboardInterrupt:
            shown.close()
            partial = partial_of(target)
            if kept := len(finished_shards(partial)):
                what = counted(kept, "finished shard")
                _print_warning(f"{partial} keeps {what}: the same command goes on from there.")
            raise


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """Without the line of code that Python's own shows."""
    warn(in_options(str(message)))


def _summary(report: Report, source: Path, policy: QuantizationPolicy) -> dict[str, Any]:
    """A run as JSON values, with the time that 80 billion weights would take at its speed."""
    from kbit.bench import gpu_timing
    from kbit.bench.quantize import PROJECTED_WEIGHTS

    values = vars(report) | {"shards": len(report.shards), "bits_per_weight": report.bits_per_weight}
    speed = report.weights_per_second
    return {
        "machine": gpu_timing.describe(report.workers[0]),
        "model": model_name(source),
        "policy": policy.to_dict(),
        **values,
        "weights_per_second": speed,
        "seconds_for_80b": PROJECTED_WEIGHTS / speed if speed else None,
        "peak_memory_mb": peak_memory_mb(),
    }


def _print_summary(report: Report, target: Path) -> None:
    resumed = f", {report.resumed_shards} of them from before" if report.resumed_shards else ""
    console.print(
        f"{escape(str(target))}: {report.bytes_in / 1e6:.1f} MB -> {report.bytes_out / 1e6:.1f} MB in "
        f"{counted(len(report.shards), 'shard')}{resumed}",
        soft_wrap=True,
    )
    share = report.quantized_weights / max(1, report.weights)
    console.print(
        f"{share:.1%} of {report.weights / 1e6:.1f} M weights at {report.bits_per_weight:.2f} bits",
        soft_wrap=True,
    )
    console.print(
        f"{report.seconds:.1f} s, {_per_second(report.weights_per_second)}, "
        f"peak memory {peak_memory_mb():.0f} MB",
        soft_wrap=True,
    )
    if report.not_finite:
        _print_warning(
            f"NaN or infinity in unquantized tensors: {first_of(report.not_finite)}. Is the source damaged?"
        )
    if report.without_codes:
        _print_warning(
            f"{counted(len(report.without_codes), 'tensor')} not calibrated, such as "
            f"{report.without_codes[0]}: the model that ran the samples has no layer of that name. Their "
            f"scales are searched."
        )
    if not has_tokenizer(target):
        console.print(
            f"{escape(str(target))} has no tokenizer, which kbit generate and kbit serve need. "
            f"{TOKENIZER_REMEDY}",
            soft_wrap=True,
        )
    left = report.bytes_out - report.quantized_bytes
    if left >= _LARGE_BYTES:
        console.print(
            f"{left / 1e6:.1f} MB stay unquantized: kbit inspect {escape(str(target))} names what is large "
            "of that, and says why",
            soft_wrap=True,
        )


def _per_second(weights: float) -> str:
    """Such as "212 M weights/s", or "440 k weights/s" where there are few."""
    if weights < 1e6:
        return f"{weights / 1e3:.0f} k weights/s"
    return f"{weights / 1e6:.{1 if weights < 1e7 else 0}f} M weights/s"


def peak_memory_mb() -> float:
    """Largest resident memory of this process so far, in millions of bytes."""
    from kbit.bench import machine

    # Not ru_maxrss where it can be avoided: Linux counts into that what the parent process had resident.
    peak = machine.peak_resident_bytes()
    if peak is not None:
        return peak / 1e6
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
