"""Picture of a result of `kbit bench generate --json`: tokens a second by way and by width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbit.bench.plots import color_of, figure_of, save

_SHARE = 0.8  # of a way's place on the axis, taken by the bars of all arms


def is_generate(result: Mapping[str, Any]) -> bool:
    """Whether a result file is one of generating: rows with a way, but not of turns."""
    return any("way" in row and "turn" not in row for row in rows_in(result))


def rows_in(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A result's rows, whatever it is a result of; none where it has no list of them."""
    rows = result.get("rows")
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def bars(result: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """{arm: {way: tokens a second}}, 16 bits first, in the order of the file otherwise."""
    found: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        found.setdefault(row["arm"], {})[row["way"]] = row["tokens_s"] or 0.0
    return dict(sorted(found.items(), key=lambda item: item[0].startswith("kbit")))


def write(result: Mapping[str, Any], folder: Path, sources: Sequence[Path] = ()) -> Path:
    """Write generate-MODEL.png: a group of bars for each way, a bar for each arm.

    `sources`: as `plots.save` takes them.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    figure, (axes,) = figure_of(1, 1)
    arms = bars(result)
    ways = list(dict.fromkeys(row["way"] for row in result["rows"]))
    width = _SHARE / len(arms)
    for i, (arm, speeds) in enumerate(arms.items()):
        color = color_of(arm)
        places = [way + (i - (len(arms) - 1) / 2) * width for way in range(len(ways))]
        drawn = axes.bar(places, [speeds.get(way, 0.0) for way in ways], width, color=color, label=arm)
        axes.bar_label(drawn, fmt="%.0f", padding=2)
    axes.set_xticks(range(len(ways)), [way.replace(", ", ",\n") for way in ways])
    axes.set_ylabel("tokens a second, one sequence")
    axes.margins(y=0.12)
    axes.legend(loc="upper left")
    axes.set_title(f"generate, {result['model']}, {result['machine'].get('gpu') or 'CPU'}")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"generate-{Path(result['model']).stem}.png"
    save(figure, file, sources)
    return file
