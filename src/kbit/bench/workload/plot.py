"""Speed-up against the number of users, with the crossover of the kernels before these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kbit.bench.plots import BASELINE_COLOR, COLORS, _figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D")
_LOST = "#c0392b"


def draw(axes: Axes, models: Sequence[Mapping[str, Any]], earlier: Mapping[str, Any]) -> None:
    """Draw the "workload" list of a result file: a colour per width, a line style per model."""
    users = sorted({item["users"] for model in models for item in model["scenarios"]})
    dtype = models[0]["scenarios"][0]["dtype"]
    for index, model in enumerate(models):
        for bits in sorted({item["bits"] for item in model["scenarios"]}):
            points = [(item["users"], item["speedup"]) for item in model["scenarios"] if item["bits"] == bits]
            axes.plot(
                *zip(*points, strict=True),
                color=COLORS[bits],
                linestyle=_STYLES[index % len(_STYLES)],
                marker=_MARKERS[index % len(_MARKERS)],
                label=f"{model['model']}, k={bits}",
            )
    axes.axhline(1, color=BASELINE_COLOR, linewidth=1)
    _mark(axes, earlier, dtype, max(users))
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(count) for count in users])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("users served at once")
    axes.set_ylabel(f"times as fast as {dtype} cuBLAS")
    axes.grid(alpha=0.3)
    axes.legend()


def _mark(axes: Axes, earlier: Mapping[str, Any], dtype: str, most: int) -> None:
    """Where the kernels before these fell behind: the region that is to be empty now."""
    users = earlier["slower_than_fp16_from_users"]
    if users > most:
        return
    axes.axvline(users, color=_LOST, linewidth=1, linestyle="--")
    axes.fill_between([users, most], 0, 1, color=_LOST, alpha=0.08, linewidth=0)
    axes.annotate(
        f"earlier kernels: slower than\n{dtype} from {users} users on ({earlier['gpu']})",
        (users, 0.05),
        xytext=(4, 2),
        textcoords="offset points",
        color=_LOST,
        fontsize=8,
    )


def write(result: Mapping[str, Any], file: Path) -> None:
    """Write a PNG or SVG of a result of `kbit bench workload`.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure, axes = _figure()
    draw(axes, result["workload"], result["earlier"])
    gpu = (result.get("machine") or {}).get("gpu", "unknown GPU")
    axes.set_title(f"Linear layers under continuous batching, {gpu}")
    figure.savefig(file)
