"""Picture of a result of `kbit eval --bits --json`: what each width costs in quality."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kbit.bench.plots import BASELINE_COLOR, COLORS, figure_of, save

# Key of a row -> label of its panel, and whether its axis is logarithmic.
_PANELS = {"perplexity": ("perplexity", False), "kl_divergence": ("KL divergence, nats", True)}
_METHODS = {
    "plain": (COLORS[3], "s", "plain"),
    "search": (COLORS[2], "o", "search (default)"),
    "calibrated": (COLORS[5], "D", "calibrated"),
}
_PEER_MARKERS = "x+^vs"


def is_quality(result: Mapping[str, Any]) -> bool:
    """Whether a result file is one of quality: rows with a perplexity, some of them of a width."""
    rows = result.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        return False
    return any(row.get("bits") and row.get("perplexity") for row in rows)


def lines(result: Mapping[str, Any], key: str) -> dict[str, list[tuple[float, float]]]:
    """{method: [(stored bits per weight, value)]} of the quantized rows, fewest bits first."""
    return _points((row for row in result["rows"] if row.get("bits")), "method", key)


def peers(result: Mapping[str, Any], key: str) -> dict[str, list[tuple[float, float]]]:
    """{other library: [(stored bits per weight, value)]}, fewest bits first."""
    return _points((row for row in result["rows"] if row.get("peer")), "peer", key)


def _points(rows: Iterable[Mapping[str, Any]], group: str, key: str) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.get(key) is not None:
            found.setdefault(row[group], []).append((row["bits_per_weight"], row[key]))
    return {name: sorted(points) for name, points in found.items()}


def write(result: Mapping[str, Any], folder: Path, sources: Sequence[Path] = ()) -> Path:
    """Write quality.png: perplexity and KL divergence against stored bits per weight.

    `sources`: as `plots.save` takes them.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    figure, panels = figure_of(1, len(_PANELS), common=False)
    rows = [row for row in result["rows"] if row.get("bits")]
    exact = [row["perplexity"] for row in result["rows"] if row.get("method") == "unquantized"]
    for axes, (key, (label, logarithmic)) in zip(panels, _PANELS.items(), strict=True):
        for method, points in lines(result, key).items():
            how, _, codebook = method.partition(", ")
            color, marker, name = _METHODS.get(how, (BASELINE_COLOR, "^", how))
            line = "--" if codebook else "-"
            name = method if codebook else name
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, linestyle=line, label=name)
        for (peer, points), marker in zip(peers(result, key).items(), itertools.cycle(_PEER_MARKERS)):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, "k", marker=marker, linestyle="none", markerfacecolor="none", label=peer)
        if key == "perplexity" and exact:
            axes.axhline(exact[0], color=BASELINE_COLOR, linewidth=1, label="unquantized")
        if logarithmic:
            axes.set_yscale("log")
        ticks = {row["bits_per_weight"]: f"{row['bits_per_weight']:.4g}\nk={row['bits']}" for row in rows}
        axes.set_xticks(list(ticks), list(ticks.values()))
        axes.set_xlabel("stored bits per weight")
        axes.set_title(label)
        axes.grid(alpha=0.3)
    panels[0].legend()
    if model := result.get("model"):
        figure.suptitle(f"{model}, {result['rows'][0]['tokens']} tokens")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "quality.png"
    save(figure, file, sources)
    return file
