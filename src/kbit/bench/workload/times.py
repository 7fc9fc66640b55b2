"""Time of a layer at any number of tokens, from a result of `kbit bench kernels --json`."""

from __future__ import annotations

import bisect
import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kbit.backends.cuda import preference, tables
from kbit.backends.cuda.compiler import arch_of
from kbit.bench import gpu_timing
from kbit.bench.kernel_rows import ALL_ROWS, COMMAND, DISPATCHED, OURS, KernelRow, compare
from kbit.bench.kernels import DEQUANTIZE, DTYPES
from kbit.bench.result_files import no_result, read_result
from kbit.bench.shapes import LayerShape
from kbit.bench.workload.model_layers import ModelLayers, active_experts
from kbit.format.errors import KbitError

INTERPOLATION = (
    "Between two measured M, log(time) is linear in log(M): exact where time is constant and where it grows "
    "in proportion. Nothing is extrapolated."
)
GROUPED_LABEL = "experts"
# How `kbit bench moe` names its products.
_GROUPED_PROBLEM = re.compile(r"(?P<shape>\w+), (?P<experts>\d+) experts$")


class NotMeasured(ValueError):
    """The table lacks what is asked for. The message says what to measure."""


@dataclass(frozen=True)
class Curve:
    """Microseconds over a positive quantity; points ascending in it."""

    points: tuple[tuple[float, float], ...]

    def covers(self, where: float) -> bool:
        """Whether `where` lies between the first and last point."""
        return self.points[0][0] <= where <= self.points[-1][0]

    def at(self, where: float) -> float:
        """Interpolate, see `INTERPOLATION`.

        Raises:
            NotMeasured: outside of the points.
        """
        if not self.covers(where):
            first, last = self.points[0][0], self.points[-1][0]
            raise NotMeasured(f"{where:g} is outside of the measured {first:g} to {last:g}")
        index = bisect.bisect_left(self.points, (where, -math.inf))
        high, above = self.points[index]
        if high == where:
            return above
        low, below = self.points[index - 1]
        part = math.log(where / low) / math.log(high / low)
        return math.exp((1 - part) * math.log(below) + part * math.log(above))


Key = tuple[str, int | None]  # (shape, bits; None for 16-bit cuBLAS)


@dataclass(frozen=True)
class Times:
    """Times of layers, of one dtype on one GPU.

    Attributes:
        dtype: "fp16" or "bf16".
        dense: {(shape, bits): microseconds over M}; bits are None for 16-bit cuBLAS.
        kernels: {(shape, bits, measured M): the kernel of that row}.
        grouped: {(shape, bits): {number of experts: microseconds over tokens per expert}}.
        arch: architecture of the GPU; None if unknown or without kernels.
        known: tables of measured choices of the GPU, by which kbit.linear goes before it estimates.
    """

    dtype: str
    dense: Mapping[Key, Curve]
    kernels: Mapping[tuple[str, int, float], str]
    grouped: Mapping[Key, Mapping[int, Curve]] = field(default_factory=dict)
    arch: str | None = None
    known: tuple[tables.Table, ...] = ()

    def bits(self, model: ModelLayers) -> list[int]:
        """Widths measured for every dense layer of a model, beside 16-bit cuBLAS."""
        widths = {bits for _, bits in self.dense if bits is not None}
        return sorted(width for width in widths if not self.missing(model, width))

    def missing(self, model: ModelLayers, bits: int) -> list[str]:
        """Dense layers of a model without a curve of this width or of 16-bit cuBLAS."""
        return [
            shape.name
            for shape in model.dense
            if (shape.name, bits) not in self.dense or (shape.name, None) not in self.dense
        ]

    def us(self, shape: LayerShape, bits: int | None, tokens: int) -> float:
        """Time of a dense layer on M = `tokens`.

        Raises:
            NotMeasured: the table has no such layer, width or M.
        """
        what = f"workload: {shape.name} in {'16' if bits is None else bits} bits, {self.dtype}"
        remedy = f"kbit bench kernels --model {shape.model} --dtype {self.dtype}"
        curve = self.dense.get((shape.name, bits))
        if curve is None:
            width = "" if bits is None else f" --bits {bits}"
            raise NotMeasured(f"{what}: not in the table. Measure it: {remedy}{width}")
        try:
            return curve.at(tokens)
        except NotMeasured as error:
            raise NotMeasured(
                f"{what}: M={error}. Measure it ({remedy} --rows 1,...,{tokens}), or lower --budget or "
                "--chunk."
            ) from None

    def kernel(self, shape: LayerShape, bits: int, tokens: int) -> str:
        """What runs a dense layer: as dispatched on the measured GPU, or the rows' own kernel."""
        points = self.dense[shape.name, bits].points
        index = bisect.bisect_right(points, (tokens, math.inf)) - 1
        name = self.kernels[shape.name, bits, points[max(index, 0)][0]]
        if name != DISPATCHED or self.arch is None:
            return name
        chosen = self._tabled(shape, bits, tokens)
        if chosen is None:
            size = (shape.out_features, shape.in_features)
            with gpu_timing.environment({"KBIT_KERNEL": ""}):  # what is forced here was not forced there
                chosen = preference.choose(tokens, DTYPES[self.dtype], *size, False, self.arch)
        return DEQUANTIZE if chosen == "cublas" else chosen

    def _tabled(self, shape: LayerShape, bits: int, tokens: int) -> str | None:
        """The kernel by the first of the GPU's tables that has the problem."""
        problem = tables.Problem(shape.out_features, shape.in_features, bits, False, self.dtype)
        rows = (table.row(tokens, problem) for table in self.known)
        return next((row.kernel for row in rows if row is not None), None)

    def grouped_us(self, shape: LayerShape, bits: int | None, per_token: int, tokens: int) -> float:
        """Time of an expert layer on `tokens` tokens before routing, uniform routing.

        Raises:
            NotMeasured: the table has no such grouped rows around it.
        """
        what = f"{shape.name} in {'16' if bits is None else bits} bits at M={tokens}"
        experts, each = active_experts(shape.experts or 1, per_token, tokens)
        curves = self.grouped.get((shape.name, bits), {})
        points = [(count, curve.at(each)) for count, curve in sorted(curves.items()) if curve.covers(each)]
        curve = Curve(tuple(points)) if points else None
        if curve is None or not curve.covers(experts):
            raise NotMeasured(
                f"{what}: no grouped rows around {experts:.0f} experts with {each:.1f} tokens each"
            )
        return curve.at(experts)


class GroupedRow(NamedTuple):
    """One measured product with many experts, `each` of which got so many tokens."""

    shape: str
    experts: int
    each: int
    bits: int | None
    dtype: str
    kernel: str
    kind: str
    us: float


def from_result(
    result: Mapping[str, Any], rows: Sequence[KernelRow], dtype: str, grouped: Iterable[GroupedRow] = ()
) -> Times:
    """Curves of one dtype; kernels as dispatched, or the fastest of ours where no row is.

    Args:
        result, rows: of `kbit bench kernels`, see `kernel_rows.load`.
        dtype: "fp16" or "bf16".
        grouped: of `kbit bench moe`, see `load_grouped`.

    Raises:
        NotMeasured: there is no row of this dtype beside its 16-bit baseline.
    """
    times: dict[Key, dict[float, float]] = {}
    kernels: dict[tuple[str, int, float], str] = {}
    for item in compare([row for row in rows if row.dtype == dtype]):
        base, ours = item.baseline, item.dispatched
        times.setdefault((base.shape, None), {})[base.rows] = base.us
        times.setdefault((base.shape, item.bits), {})[base.rows] = ours.us
        kernels[base.shape, item.bits, base.rows] = ours.kernel
    if not times:
        raise NotMeasured(
            f"workload: the table has no {dtype} rows beside 16-bit cuBLAS. Measure them: "
            f"{COMMAND} --dtype {dtype} {ALL_ROWS} --json FILE"
        )
    return Times(
        dtype,
        {key: Curve(tuple(sorted(points.items()))) for key, points in times.items()},
        kernels,
        _grouped(grouped, dtype),
        _arch(result.get("machine") or {}),
        _tables(result.get("machine") or {}),
    )


def _grouped(rows: Iterable[GroupedRow], dtype: str) -> dict[Key, dict[int, Curve]]:
    """Fastest 16-bit row and dispatched (else fastest) row of ours, by shape, width, experts and tokens."""
    found: dict[Key, dict[int, dict[float, dict[str, float]]]] = {}
    for row in rows:
        if row.dtype != dtype or (row.bits is not None and row.kind != OURS):
            continue
        experts = found.setdefault((row.shape, row.bits), {}).setdefault(row.experts, {})
        experts.setdefault(row.each, {})[row.kernel] = row.us
    return {
        key: {
            count: Curve(
                tuple((each, us.get(DISPATCHED, min(us.values()))) for each, us in sorted(points.items()))
            )
            for count, points in by_count.items()
        }
        for key, by_count in found.items()
    }


def load_grouped(path: Path, gpu: str | None = None) -> list[GroupedRow]:
    """The products in a result of `kbit bench moe --json`.

    Args:
        path: the file.
        gpu: the name of the GPU that it has to be of; None: any.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not one, or of another GPU.
    """
    command = "kbit bench moe"
    result = read_result(path, command)
    measured_on = (result.get("machine") or {}).get("gpu")
    if gpu is not None and measured_on != gpu:
        raise ValueError(
            f"{path} is of {measured_on}, and the kernel table of {gpu}. Measure both on one GPU."
        )
    try:
        return [
            GroupedRow(
                shape=f"moe_{match['shape']}",
                experts=int(match["experts"]),
                each=row["rows"],
                dtype=result["dtype"],
                **{name: row[name] for name in ("bits", "kernel", "kind", "us")},
            )
            for row in result["rows"]
            if (match := _GROUPED_PROBLEM.match(row["problem"]))
        ]
    except (KeyError, TypeError) as error:
        raise no_result(path, command, error) from None


def _arch(machine: Mapping[str, Any]) -> str | None:
    """Architecture of a result's GPU; None where it is not told or has no kernels."""
    try:
        major, minor = str(machine["compute_capability"]).split(".")
        return arch_of(int(major), int(minor))
    except (KeyError, ValueError, KbitError):
        return None


def _tables(machine: Mapping[str, Any]) -> tuple[tables.Table, ...]:
    """The tables of choices of a result's GPU that are here, the user's first; damaged ones are left out."""
    gpu = str(machine.get("gpu") or "")
    found = []
    for file in tables.files_of(gpu) if gpu else ():
        with contextlib.suppress(tables.TableError, OSError):
            found.append(tables.load(file))
    return tuple(table for table in found if table is not None)
