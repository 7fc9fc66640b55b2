"""Pictures of a result of `kbit bench kernels --json`: speed-up against M per model, and a roofline."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbit.bench.kernel_rows import BASELINE, DISPATCHED, KernelRow, compare, totals
from kbit.bench.result_files import remedy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {2: "#1b9e77", 3: "#d95f02", 4: "#7570b3", 5: "#e7298a"}
BASELINE_COLOR = "#666666"
# Key of a PNG's metadata: JSON, {name of a result file: SHA-256 of its bytes}.
DRAWN_FROM = "Drawn from"
_LEAST_RATIO = 1.3  # of labelled numbers of tokens


def figure_of(rows: int = 1, columns: int = 1, common: bool = True) -> tuple[Figure, list[Axes]]:
    """A picture of empty panels, row by row, with `common` ranges of their axes; it needs no display.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need matplotlib ({error}). pip install matplotlib") from None
    figure = Figure(figsize=(7, 4.5 if rows == 1 else 3 * rows), dpi=120, layout="constrained")
    return figure, list(figure.subplots(rows, columns, sharex=common, sharey=common, squeeze=False).flat)


def save(figure: Figure, file: Path, sources: Sequence[Path] = ()) -> None:
    """Write a picture. A PNG tells which result files it shows, so that a newer file is noticed.

    Args:
        figure: what was drawn.
        file: its suffix is the format.
        sources: the result files; those that can be read once alone, such as a pipe, are not told.

    Raises:
        OSError: the file cannot be written.
    """
    hashes = {path.name: sha256(path) for path in sources if path.is_file()}
    if hashes and file.suffix.lower() == ".png":  # other formats have other keys
        figure.savefig(file, metadata={DRAWN_FROM: json.dumps(hashes)})
    else:
        figure.savefig(file)


def sha256(file: Path) -> str:
    """SHA-256 of a file's bytes, as `sha256sum` prints it."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def color_of(arm: str) -> str:
    """The colour of an arm of a benchmark of models, by its name, such as "kbit k=4" or "bf16"."""
    return COLORS[int(arm.rpartition("=")[2])] if arm.startswith("kbit") else BASELINE_COLOR


def speedups(rows: Sequence[KernelRow], model: str, dtype: str) -> dict[int, dict[int, float]]:
    """{bits: {M: speed-up}} of a model's block, each layer as often as it runs, kernels as dispatched."""
    result: dict[int, dict[int, float]] = {}
    comparisons = [
        item for item in compare(rows) if (item.baseline.model, item.baseline.dtype) == (model, dtype)
    ]
    for count in sorted({item.baseline.rows for item in comparisons}):
        for total in totals([item for item in comparisons if item.baseline.rows == count], dispatched=True):
            result.setdefault(total.bits, {})[count] = total.speedup
    return result


def draw_speedup(rows: Sequence[KernelRow], model: str, dtype: str, gpu: str) -> Figure:
    """One model's speed-up over 16-bit cuBLAS against M, a line per width."""
    found = sorted(speedups(rows, model, dtype).items())
    lines = [(f"k={bits}", COLORS[bits], line) for bits, line in found]
    return _draw_lines(lines, dtype, f"{model}: linear layers of a block, {gpu}")


def draw_models(rows: Sequence[KernelRow], bits: int, dtype: str, gpu: str) -> Figure:
    """Every model's speed-up at one width."""
    models = dict.fromkeys(row.model for row in rows if row.dtype == dtype)
    found = {model: speedups(rows, model, dtype).get(bits) for model in models}
    drawn = [(model, line) for model, line in found.items() if line]
    lines = [(model, color, line) for (model, line), color in zip(drawn, itertools.cycle(COLORS.values()))]
    return _draw_lines(lines, dtype, f"linear layers of a block in {bits} bits, {gpu}")


def _draw_lines(lines: Sequence[tuple[str, str, dict[int, float]]], dtype: str, title: str) -> Figure:
    """Label, colour and {M: speed-up} of each."""
    figure, [axes] = figure_of()
    for label, color, line in lines:
        axes.plot(list(line), list(line.values()), marker="o", color=color, label=label)
    axes.axhline(1, color=BASELINE_COLOR, linewidth=1)
    axes.set_xscale("log", base=2)
    ticks = sorted({count for _, _, line in lines for count in line})
    axes.set_xticks(ticks, [str(tick) if apart(tick, ticks) else "" for tick in ticks])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens M")
    axes.set_ylabel(f"times as fast as {dtype} cuBLAS")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def apart(tick: int, ticks: Sequence[int]) -> bool:
    """Whether a tick's label has room beside the one before it."""
    return all(other >= tick or tick >= _LEAST_RATIO * other for other in ticks)


def intensity(row: KernelRow) -> float:
    """Operations per byte of weights that the kernel reads."""
    return 2 * row.rows * row.in_features * row.out_features / row.weight_bytes


def roofline(rows: Sequence[KernelRow], bandwidth: float) -> list[tuple[float, float]]:
    """Three points of the measured roofs over rows of one dtype: (operations per byte, TFLOP/s).

    The slanted roof is the read bandwidth (GB/s), the flat one the fastest 16-bit cuBLAS row.
    """
    top = max(row.tflop_s for row in rows if row.kind == BASELINE)
    corner = top * 1e3 / bandwidth
    places = [intensity(row) for row in rows]
    least, most = min(places), max(*places, 2 * corner)
    return [(least, least * bandwidth / 1e3), (corner, top), (most, top)]


def under_roofs(rows: Sequence[KernelRow]) -> dict[int | None, list[tuple[float, float]]]:
    """{bits: points} to draw under `roofline`, of rows of one dtype; None: those of 16-bit cuBLAS."""
    found: dict[int | None, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.bits or 0):
        if row.kind == BASELINE or (row.kernel == DISPATCHED and row.bits is not None):
            found.setdefault(row.bits, []).append((intensity(row), row.tflop_s))
    return found


def draw_roofline(rows: Sequence[KernelRow], dtype: str, bandwidth: float, gpu: str) -> Figure:
    """TFLOP/s over operations per weight byte, under the roofs of `roofline`."""
    figure, [axes] = figure_of()
    rows = [row for row in rows if row.dtype == dtype]
    roofs = roofline(rows, bandwidth)
    axes.plot(*zip(*roofs, strict=True), color="black", label="measured roofs")
    for bits, points in under_roofs(rows).items():
        x, y = zip(*points, strict=True)
        label, color = (f"k={bits}", COLORS[bits]) if bits else (f"{dtype} cuBLAS", BASELINE_COLOR)
        axes.scatter(x, y, s=14, label=label, color=color, marker="o" if bits else "x")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("operations per byte of weights")
    axes.set_ylabel("TFLOP/s")
    axes.set_title(f"{gpu}: {bandwidth:.0f} GB/s read, {roofs[-1][1]:.0f} TFLOP/s {dtype} at most")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def write(
    result: dict[str, Any], rows: Sequence[KernelRow], folder: Path, sources: Sequence[Path] = ()
) -> list[Path]:
    """Write every picture of a result file; returns their paths. `sources`: as `save` takes them.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder cannot be written.
        ValueError: there are no rows with a 16-bit baseline, or no bandwidth.
    """
    if not compare(rows):
        raise ValueError("bench plot: the file holds no kernel beside a 16-bit baseline; nothing to draw.")
    bandwidth = result.get("read_bandwidth_gb_s")
    if not isinstance(bandwidth, int | float) or not bandwidth > 0:
        raise ValueError(
            f"bench plot: read_bandwidth_gb_s of the file is {bandwidth!r}. {remedy('kbit bench kernels')}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    gpu = str(result.get("machine", {}).get("gpu", "unknown GPU"))
    written = []
    for name, figure in _pictures(rows, bandwidth, gpu):
        written.append(folder / f"{name}.png")
        save(figure, written[-1], sources)
    return written


def _pictures(rows: Sequence[KernelRow], bandwidth: float, gpu: str) -> Iterator[tuple[str, Figure]]:
    """Every picture of the rows by its name, drawn when its turn comes."""
    for dtype in dict.fromkeys(row.dtype for row in rows):
        for model in dict.fromkeys(row.model for row in rows if row.dtype == dtype):
            yield f"speedup-{model}-{dtype}", draw_speedup(rows, model, dtype, gpu)
        for bits in sorted({row.bits for row in rows if row.dtype == dtype and row.bits is not None}):
            yield f"speedup-models-k{bits}-{dtype}", draw_models(rows, bits, dtype, gpu)
        yield f"roofline-{dtype}", draw_roofline(rows, dtype, bandwidth, gpu)
