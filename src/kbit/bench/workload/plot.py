"""Speed-up against the number of users, with the crossover of the kernels before these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbit.bench.plots import BASELINE_COLOR, COLORS, figure_of, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARKERS = ("o", "s", "^", "D")
_LOST = "#c0392b"


def draw(axes: Axes, models: Sequence[Mapping[str, Any]], bits: int, earlier: Mapping[str, Any]) -> None:
    """Draw one width of the "workload" list of a result file: a line per model."""
    users = sorted({item["users"] for model in models for item in model["scenarios"]})
    dtype = models[0]["scenarios"][0]["dtype"]
    colors = list(COLORS.values())
    for index, model in enumerate(models):
        points = [(item["users"], item["speedup"]) for item in model["scenarios"] if item["bits"] == bits]
        axes.plot(
            *zip(*points, strict=True),
            color=colors[index % len(colors)],
            marker=_MARKERS[index % len(_MARKERS)],
            label=model["model"],
        )
    axes.axhline(1, color=BASELINE_COLOR, linewidth=1)
    _mark(axes, earlier, dtype, max(users))
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(count) for count in users])
    axes.set_ylim(bottom=0)
    axes.set_title(f"k={bits}", fontsize=10)
    axes.grid(alpha=0.3)


def _mark(axes: Axes, earlier: Mapping[str, Any], dtype: str, most: int) -> None:
    """Where the kernels before these fell behind: the region that is to be empty now."""
    users = earlier["slower_than_fp16_from_users"]
    if users > most:
        return
    axes.axvline(users, color=_LOST, linewidth=1, linestyle="--")
    axes.fill_between([users, most], 0, 1, color=_LOST, alpha=0.08, linewidth=0)
    axes.annotate(
        f"earlier kernels are\nslower than {dtype}\n({earlier['gpu']})",
        (users, 0.05),
        xytext=(4, 2),
        textcoords="offset points",
        color=_LOST,
        fontsize=7,
    )


def write(result: Mapping[str, Any], file: Path, sources: Sequence[Path] = ()) -> None:
    """Write a PNG or SVG of a result of `kbit bench workload`: a panel per width.

    `sources`: as `plots.save` takes them.

    Raises:
        ImportError: matplotlib is not installed.
    """
    models = result["workload"]
    dtype = models[0]["scenarios"][0]["dtype"]
    widths = sorted({item["bits"] for model in models for item in model["scenarios"]})
    columns = min(2, len(widths))
    figure, panels = figure_of(-(-len(widths) // columns), columns)
    for bits, axes in zip(widths, panels, strict=False):
        draw(axes, models, bits, result["earlier"])
    for axes in panels[len(widths) :]:
        axes.set_axis_off()
    panels[0].legend(fontsize=8)
    figure.supxlabel("users served at once", fontsize=10)
    figure.supylabel(f"times as fast as {dtype} cuBLAS", fontsize=10)
    gpu = (result.get("machine") or {}).get("gpu", "unknown GPU")
    figure.suptitle(f"Linear layers under continuous batching, {gpu}")
    save(figure, file, sources)
