"""Picture of a result of `kbit profile --json`: what a decode step is made of, a bar for each profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kbit.bench.plots import figure_of, save

IDLE = "nothing runs"
REST = "other"
_LEAST = 0.05  # of a step; purposes that are less of every one are summed
_HEIGHT = 0.8  # of a bar's place on the axis


def is_profile(result: Mapping[str, Any]) -> bool:
    """Whether a result file is one of profiles."""
    return isinstance(result.get("profiles"), list)


def fastest(profiles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By batch and width: of several implementations of 16-bit experts the fastest one alone."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for one in profiles:
        key = one["arm"] if one["arm"].startswith("kbit") else one["arm"].partition(" ")[0], one["batch"]
        if key not in best or one["step_us"] < best[key]["step_us"]:
            best[key] = one
    return sorted(best.values(), key=lambda one: one["batch"])


def parts(profiles: list[dict[str, Any]]) -> dict[str, list[float]]:
    """{purpose: microseconds in each profile}, the largest first, then small ones summed, then idle time."""
    steps = [one["step_us"] for one in profiles]
    times = [{part["group"]: part["us"] for part in one["groups"]} for one in profiles]
    rows = {
        group: [of.get(group, 0.0) for of in times] for group in dict.fromkeys(g for of in times for g in of)
    }
    large = {
        group: us
        for group, us in rows.items()
        if group != REST and any(part >= _LEAST * step for part, step in zip(us, steps, strict=True))
    }
    found = dict(sorted(large.items(), key=lambda item: -sum(item[1])))
    found[REST] = [sum(of.values()) - sum(us[i] for us in large.values()) for i, of in enumerate(times)]
    found[IDLE] = [max(0.0, step - sum(of.values())) for step, of in zip(steps, times, strict=True)]
    return found


def write(result: Mapping[str, Any], folder: Path, sources: Sequence[Path] = ()) -> Path:
    """Write profile-MODEL.png: a stacked bar for each profile, by purpose.

    `sources`: as `plots.save` takes them.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: the folder cannot be written.
    """
    profiles = fastest(result["profiles"])
    figure, (axes,) = figure_of(1, 1)
    figure.set_figheight(1.6 + 0.4 * len(profiles))
    places = range(len(profiles))
    ends = [0.0] * len(profiles)
    for index, (purpose, us) in enumerate(parts(profiles).items()):
        color = {REST: "#bbbbbb", IDLE: "#eeeeee"}.get(purpose, f"C{index}")
        axes.barh(places, us, _HEIGHT, ends, color=color, label=purpose)
        ends = [end + more for end, more in zip(ends, us, strict=True)]
    for place, end in zip(places, ends, strict=True):
        axes.annotate(f" {end:.0f}", (end, place), va="center")
    names = [", ".join(filter(None, (one["arm"], f"batch {one['batch']}"))) for one in profiles]
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("microseconds of a decode step")
    figure.legend(loc="outside lower center", ncols=4, fontsize="small")
    first = profiles[0]
    axes.set_title(
        f"{first['model']}, {first['context']} tokens before, {result['machine'].get('gpu') or 'CPU'}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"profile-{Path(first['model']).stem}.png"
    save(figure, file, sources)
    return file
