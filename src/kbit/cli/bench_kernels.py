"""`kbit bench kernels`, `check`, `dequant` and `plot`: GPU kernels against 16-bit cuBLAS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kbit.cli.consoles import Console, tracked
from kbit.cli.options import names, numbers, widths, words
from kbit.cli.outputs import JsonFile, check_folder, write_json
from kbit.cli.tables import show

if TYPE_CHECKING:
    from rich.table import Table

    from kbit.bench.kernel_rows import KernelRow
    from kbit.bench.kernels import Plan
    from kbit.bench.shapes import LayerShape

console = Console()


class TimerName(str, Enum):
    """How kernels are timed; ncu-record is what `--timer ncu` runs inside ncu."""

    graph = "graph"
    ncu = "ncu"
    ncu_record = "ncu-record"


Names = Annotated[str, typer.Option("--shape", help="Only these shapes, such as l8b,l70b; all by default.")]
Models = Annotated[str, typer.Option("--model", help="Only the shapes of these models.")]
Rows = Annotated[str, typer.Option("--rows", "-m", help="Numbers of tokens M, such as 1,2,4.")]
Bits = Annotated[str, typer.Option(help="Bits per weight, such as 2,4.")]
Dtypes = Annotated[str, typer.Option("--dtype", help="Activations: fp16, bf16, or both: fp16,bf16.")]
Repeats = Annotated[int, typer.Option(min=7, help="Timed replays of each arm.")]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--with",
        metavar="NAME=VALUE",
        help="Also measure with this setting, such as KBIT_KERNEL=stream; repeatable.",
    ),
]
# Settings that two arms of one process may differ in; what is compiled stays loaded.
READ_AT_EVERY_CALL = ("KBIT_BACKEND", "KBIT_KERNEL")
DECODE = "1,2,4,8,16,32,64"
EVERY = f"{DECODE},128,256,512,1024,2048,4096,8192"


@dataclass(frozen=True)
class Choice:
    """The options that say what is measured, parsed."""

    shapes: tuple[LayerShape, ...]
    dtypes: tuple[str, ...]
    plan: Plan

    def arguments(self) -> list[str]:
        """The same choice as a command line after `kbit`."""
        plan = self.plan
        words = ["bench", "kernels", "--shape", ",".join(shape.name for shape in self.shapes)]
        words += ["--rows", ",".join(map(str, plan.rows)), "--bits", ",".join(map(str, plan.bits))]
        words += ["--dtype", ",".join(self.dtypes), "--repeats", str(plan.repeats)]
        for settings in plan.variants:
            words += ["--with", ",".join(f"{name}={value}" for name, value in settings.items())]
        return words if plan.with_peers else [*words, "--no-peers"]


def _settings(text: str) -> dict[str, str]:
    pairs = [word.partition("=") for word in words(text)]
    if not pairs or not all(name in READ_AT_EVERY_CALL and equals for name, equals, _ in pairs):
        known = " and ".join(READ_AT_EVERY_CALL)
        raise ValueError(f"--with takes NAME=VALUE, several joined by commas, of {known}; got {text!r}.")
    return {name: value for name, _, value in pairs}


def choose(
    shape: str,
    model: str,
    rows: str,
    bits: str,
    dtype: str,
    repeats: int,
    variants: Sequence[str] = (),
    **options: bool,
) -> Choice:
    """Parse and check the options.

    Raises:
        ValueError: one of them names what does not exist.
    """
    from kbit.bench import kernels, shapes

    dtypes = tuple(names("--dtype", dtype, list(kernels.DTYPES)))
    plan = kernels.Plan(
        rows=numbers("--rows", rows),
        bits=widths(bits),
        repeats=repeats,
        variants=[_settings(text) for text in variants],
        **options,  # type: ignore[arg-type]
    )
    return Choice(shapes.select(words(shape), words(model)), dtypes, plan)


def _plans(choice: Choice, timer: Any = None) -> list[tuple[LayerShape, Plan]]:
    changes: dict[str, Any] = {} if timer is None else {"timer": timer}
    return [
        (shape, replace(choice.plan, dtype=dtype, **changes))
        for dtype in choice.dtypes
        for shape in choice.shapes
    ]


def _header(timer: TimerName, choice: Choice) -> dict[str, Any]:
    """The result file without its rows: machine, bandwidth, protocol."""
    from kbit.bench import gpu_timing

    protocol = {"timer": timer.value, "cold_copies_over_l2": gpu_timing.CACHE_FACTOR}
    return gpu_timing.result_header(choice.plan.repeats) | protocol


def _measure(
    choice: Choice, result: dict[str, Any], file: Path | None, rows: list[KernelRow], timer: Any = None
) -> None:
    """Measure a choice into `rows`; they and the file grow by a shape, so that an interruption loses one."""
    from kbit.bench import kernel_rows, kernels

    absent: dict[str, list[str]] = {}
    for shape, plan in tracked(_plans(choice, timer), "kernels"):
        rows += kernels.shape_rows(shape, plan, absent)
        write_json(file, result | {"peers_absent": absent, "rows": kernel_rows.as_json(rows)})
    for name, reasons in absent.items():
        console.print(f"{name}: {'; '.join(reasons)}", markup=False, soft_wrap=True)


def _print_tables(tables: Sequence[Table], result: dict[str, Any]) -> None:
    about = result["machine"]
    console.print(
        f"{about['gpu']}, driver {about['driver']}, CUDA {about['cuda']}, torch {about['torch']}, "
        f"{result['read_bandwidth_gb_s']:.0f} GB/s ({result['read_bandwidth_method']})",
        markup=False,
    )
    for table in tables:
        show(table)


def kernels(
    shape: Names = "",
    model: Models = "",
    rows: Rows = DECODE,
    bits: Bits = "2,3,4,5",
    dtype: Dtypes = "fp16",
    repeats: Repeats = 11,
    variants: Variants = None,
    peers: Annotated[bool, typer.Option(help="Measure others' kernels, where they can be imported.")] = True,
    timer: Annotated[TimerName, typer.Option(help="Graph, or ncu for kernel-only times.")] = TimerName.graph,
    json_file: JsonFile = None,
) -> None:
    """GPU kernels against 16-bit cuBLAS. Cold weights, CUDA-graph replays, one table per M."""
    from kbit.bench import gpu_timing, kernel_rows, kernel_tables, ncu

    choice = choose(shape, model, rows, bits, dtype, repeats, variants or (), with_peers=peers)
    gpu_timing.require_gpu("kbit bench kernels")
    measured: list[KernelRow] = []
    if timer is TimerName.ncu_record:
        _measure(choice, {"timer": timer.value}, json_file, measured, ncu.record)
        return
    result = _header(timer, choice)
    try:
        if timer is TimerName.ncu:
            recorded, measured = ncu.run(choice.arguments(), repeats)
            result |= {"peers_absent": recorded["peers_absent"], "rows": kernel_rows.as_json(measured)}
            write_json(json_file, result)
        else:
            _measure(choice, result, json_file, measured)
    finally:
        if measured:
            _print_tables(list(kernel_tables.tables(measured, result["read_bandwidth_gb_s"])), result)
            console.print(kernel_tables.NOTE, soft_wrap=True)
            for line in kernel_tables.losses(measured):
                console.print(line, markup=False, soft_wrap=True)


def check(
    shape: Names = "",
    model: Models = "",
    rows: Rows = EVERY,
    bits: Bits = "2,3,4,5",
    dtype: Dtypes = "fp16,bf16",
    repeats: Repeats = 11,
    source: Annotated[
        Path | None, typer.Option("--from", help="Judge these results of `bench kernels --json` instead.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Find where kbit is slower than 16-bit cuBLAS. Exit 1 if it is by more than it may be."""
    from kbit.bench import gpu_timing, kernel_rows
    from kbit.bench.check import of_problems, verdicts

    choice = choose(shape, model, rows, bits, dtype, repeats, dequantize=False, with_peers=False)
    if source is not None:
        if json_file is not None:
            raise ValueError("bench check --from measures nothing that --json could write. Drop one of them.")
        named = {each.name for each in choice.shapes} if shape or model else None
        tokens = None if rows == EVERY else choice.plan.rows
        measured = of_problems(kernel_rows.load(source)[1], named, tokens, choice.plan.bits, choice.dtypes)
    else:
        gpu_timing.require_gpu("kbit bench check")
        measured = []
        _measure(choice, _header(TimerName.graph, choice), json_file, measured)
    found = verdicts(measured)
    if not found:
        raise ValueError("bench check: there is no kernel beside a 16-bit baseline to judge.")
    broken = [verdict for verdict in found if not verdict.holds]
    for verdict in broken:
        console.print(str(verdict), markup=False, soft_wrap=True)
    console.print(f"{len(found) - len(broken)} of {len(found)} problems keep the bound")
    if broken:
        raise typer.Exit(1)


def dequant(
    shape: Names = "",
    model: Models = "",
    rows: Rows = "64,256,1024,4096",
    bits: Bits = "2,3,4,5",
    dtype: Dtypes = "fp16",
    repeats: Repeats = 11,
    products: Annotated[bool, typer.Option(help="Time dequantize + cuBLAS, by shape and M.")] = True,
    alone: Annotated[
        bool, typer.Option(help="Time quantize, dequantize and repack alone, on 4096x14336 and 8192x28672.")
    ] = True,
    json_file: JsonFile = None,
) -> None:
    """What decoding in front of cuBLAS costs. One table per width; and kernels over rows alone."""
    from kbit.bench import conversions, gpu_timing
    from kbit.bench import dequant as bench

    choice = choose(shape, model, rows, bits, dtype, repeats, with_peers=False)
    gpu_timing.require_gpu("kbit bench dequant")
    result = _header(TimerName.graph, choice)
    bandwidth = result["read_bandwidth_gb_s"]
    measured: list[bench.DequantizeRow] = []
    for item, plan in tracked(_plans(choice) if products else [], "dequant"):
        measured += bench.shape_rows(item, plan)
        write_json(json_file, result | {"rows": bench.as_json(measured)})
    result["rows"] = bench.as_json(measured)
    kernels_alone: list[conversions.ConversionRow] = []
    for name in choice.dtypes if alone else ():
        kernels_alone += conversions.measure(replace(choice.plan, dtype=name))
        write_json(json_file, result | {"row_kernels": conversions.as_json(kernels_alone, bandwidth)})
    for name in choice.dtypes if products else ():
        chosen = [row for row in measured if row.dtype == name]
        _print_tables(list(bench.tables(chosen, bandwidth)), result)
    if alone:
        _print_tables(list(conversions.tables(kernels_alone, bandwidth)), result)


def plot(
    file: Annotated[
        Path,
        typer.Argument(
            help="A --json of `bench kernels`, `generate` or `chat`, `profile`, or `eval --bits`."
        ),
    ],
    out: Annotated[Path, typer.Option(callback=check_folder, help="Folder for the PNGs.")] = Path(),
) -> None:
    """Draw a result as PNGs. Speed-up, roofline, tokens a second, waits, steps, quality; needs matplotlib."""
    from kbit.bench import chat_plot, generate_plot, kernel_rows, plots, profile_plot, quality_plot
    from kbit.bench.result_files import no_result, read_result

    found = read_result(file, kernel_rows.COMMAND)
    kinds = {
        "kbit eval --bits": (quality_plot.is_quality, quality_plot.write),
        "kbit bench generate": (generate_plot.is_generate, generate_plot.write),
        "kbit bench chat": (chat_plot.is_chat, chat_plot.write),
        "kbit profile": (profile_plot.is_profile, profile_plot.write),
    }
    for command, (is_one, write) in kinds.items():
        if is_one(found):
            try:
                written = [write(found, out, [file])]
            except (LookupError, TypeError, AttributeError) as error:
                raise no_result(file, command, error) from error
            break
    else:
        try:
            rows = kernel_rows.rows_of(found, file)
        except ValueError as error:
            others = "`kbit bench generate`, `kbit bench chat`, `kbit profile` and `kbit eval --bits`"
            raise ValueError(f"{error}. Results of {others} can be drawn, too.") from None
        written = plots.write(found, rows, out, [file])
    for path in written:
        console.print(str(path), markup=False, soft_wrap=True)
