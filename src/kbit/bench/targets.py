"""What the kernels have to reach, from targets.json: floors, goals, and the bound for every problem."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class Target:
    """Least and wished-for value of a ratio where larger is better."""

    floor: float
    goal: float

    def verdict(self, value: float) -> str:
        """ "goal", "floor" or "below"."""
        return "goal" if value >= self.goal else "floor" if value >= self.floor else "below"


@cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("kbit.bench").joinpath("targets.json").read_text())


def speedup(shape: str, rows: int, bits: int) -> Target | None:
    """Target of (16-bit time / our time); None where none is set.

    A number of tokens between two columns takes the column above it.
    """
    data = _data()
    if bits != data["bits"] or shape not in data["speedups"]:
        return None
    return Target(*data["speedups"][shape][_column(rows)])


def _column(rows: int) -> int:
    limits = _data()["columns"]
    return next(index for index, limit in enumerate(limits) if limit is None or rows <= limit)


def never_slower(shape: str, rows: int, bits: int) -> float:
    """Least (16-bit time / dispatched time) that any problem may have.

    The last column's floor, at every M; where the floor of M's own column is lower (M = 256 on the small
    layers), that one.
    """
    data = _data()
    bounds = data["never_slower"]
    listed = data["speedups"].get(shape)
    least = listed[-1][0] if listed else bounds["unlisted_shape"]
    if bits != data["bits"]:
        return min(least, bounds["other_bits"])
    return min(least, listed[_column(rows)][0]) if listed else least


def width_ratio(shape: str, rows: int, bits: int) -> float | None:
    """Largest (time at `bits` / time at 4 bits) allowed; None where none is set."""
    widths = _data()["widths"]
    if (shape, rows) != (widths["shape"], widths["rows"]):
        return None
    return widths["time_over_4_bits"].get(str(bits))


def read_bandwidth(shape: str, rows: int, bits: int) -> Target | None:
    """Target of (GB/s of packed bytes / the machine's read bandwidth); None where none is set."""
    data = _data()
    target = data["read_bandwidth"]
    if bits != data["bits"] or shape not in target["shapes"] or rows != target["rows"]:
        return None
    return Target(target["floor"], target["goal"])


def dequantize_bandwidth(weights: int) -> float | None:
    """Least share of the read bandwidth for dequantizing so many weights; None for small layers."""
    target = _data()["dequantize_bandwidth"]
    return target["floor"] if weights >= target["least_weights"] else None
