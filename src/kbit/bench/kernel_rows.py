"""One row per measured kernel, and how the rows of one problem compare; no GPU is needed to read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kbit.bench.result_files import no_result, read_result

# Who a row belongs to. Only "ours" competes for "best".
BASELINE, OURS, PEER = "baseline", "ours", "peer"
# The path that kbit.linear takes by itself.
DISPATCHED = "kbit"
# Problems of `kbit bench moe` that begin so have tokens as their rows, others the rows of each expert.
COUNTED_IN_TOKENS = ("layer", "router")
COMMAND = "kbit bench kernels"  # whose results these are
ALL_ROWS = "--rows 1,2,4,8,16,32,64,256,1024,4096,8192"  # of that, for what takes any number of tokens
# What JSON makes of a row's fields.
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "float": (int, float),
    "int | None": (int, type(None)),
}


@dataclass(frozen=True)
class KernelRow:
    """One measurement of y[rows, out_features] = x[rows, in_features] @ W^T.

    `bits` is None for the 16-bit baseline, `us` a median, `spread` (max - min) / median, `copies` how many
    copies of the weight were rotated, `weight_bytes` what one copy occupies in this kernel's own format.
    """

    model: str
    shape: str
    in_features: int
    out_features: int
    count: int
    rows: int
    bits: int | None
    dtype: str
    kernel: str
    kind: str
    us: float
    spread: float
    copies: int
    weight_bytes: int

    @property
    def gb_s(self) -> float:
        """Weight bytes over time."""
        return self.weight_bytes / self.us / 1e3

    @property
    def tflop_s(self) -> float:
        """Arithmetic over time."""
        return 2 * self.rows * self.in_features * self.out_features / self.us / 1e6

    @property
    def problem(self) -> tuple[str, str, int]:
        """(dtype, shape, rows): what a baseline is shared by."""
        return self.dtype, self.shape, self.rows


@dataclass(frozen=True)
class Comparison:
    """All kernels of one problem and width, beside the 16-bit baseline of the same run."""

    baseline: KernelRow
    bits: int
    kernels: dict[str, KernelRow]

    @property
    def best(self) -> KernelRow:
        """The fastest of our own kernels."""
        return min((row for row in self.kernels.values() if row.kind == OURS), key=lambda row: row.us)

    @property
    def dispatched(self) -> KernelRow:
        """What users get; the best where the rows hold no dispatched kernel."""
        return self.kernels.get(DISPATCHED, self.best)

    def speedup(self, row: KernelRow) -> float:
        """Time of the baseline / time of `row`."""
        return self.baseline.us / row.us


def compare(rows: Iterable[KernelRow]) -> list[Comparison]:
    """Group rows by problem and width, in the order they came."""
    rows = list(rows)
    baselines = {row.problem: row for row in rows if row.kind == BASELINE}
    groups: dict[tuple[tuple[str, str, int], int], dict[str, KernelRow]] = {}
    for row in rows:
        if row.bits is not None:
            groups.setdefault((row.problem, row.bits), {})[row.kernel] = row
    return [
        Comparison(baselines[problem], bits, kernels)
        for (problem, bits), kernels in groups.items()
        if problem in baselines and any(row.kind == OURS for row in kernels.values())
    ]


@dataclass(frozen=True)
class Total:
    """Time of all layers of one model's block, each as often as it runs."""

    model: str
    bits: int
    us: float
    baseline_us: float

    @property
    def speedup(self) -> float:
        """Time of the baseline / our time."""
        return self.baseline_us / self.us


def totals(comparisons: Sequence[Comparison], dispatched: bool = False) -> list[Total]:
    """One per model and width of comparisons of one M and dtype; of the best kernels or the dispatched."""
    sums: dict[tuple[str, int], tuple[float, float]] = {}
    for item in comparisons:
        count = item.baseline.count
        ours = (item.dispatched if dispatched else item.best).us * count
        key = (item.baseline.model, item.bits)
        us, baseline_us = sums.get(key, (0.0, 0.0))
        sums[key] = (us + ours, baseline_us + item.baseline.us * count)
    return [Total(model, bits, *times) for (model, bits), times in sums.items()]


def as_json(rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    """Rows as JSON objects, with GB/s and the speed-up over the baseline written out for readers."""
    baselines = {row.problem: row.us for row in rows if row.kind == BASELINE}
    result = []
    for row in rows:
        item = asdict(row) | {"us": round(row.us, 3), "spread": round(row.spread, 3)}
        base = baselines.get(row.problem)
        item["gb_s"] = round(row.gb_s, 1) if row.us else None
        item["vs_fp16"] = round(base / row.us, 3) if base and row.us else None
        result.append(item)
    return result


def from_json(items: Iterable[dict[str, Any]]) -> list[KernelRow]:
    """Rows that `as_json` wrote."""
    names = [field.name for field in fields(KernelRow)]
    return [KernelRow(**{name: item[name] for name in names}) for item in items]


def load(path: Path) -> tuple[dict[str, Any], list[KernelRow]]:
    """A result file of `kbit bench kernels --json`, and its rows.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not one.
    """
    result = read_result(path, COMMAND)
    return result, rows_of(result, path)


def rows_of(result: Mapping[str, Any], path: Path) -> list[KernelRow]:
    """The rows of a result that was read from `path`.

    Raises:
        ValueError: it is none of `kbit bench kernels --json`.
    """
    try:
        rows = from_json(result["rows"])
    except (KeyError, TypeError) as error:
        raise no_result(path, COMMAND, error) from None
    for row in rows:
        for field in fields(KernelRow):
            value = getattr(row, field.name)
            if type(value) not in _JSON_TYPES[str(field.type)] or (field.name == "us" and not value > 0):
                raise no_result(path, COMMAND, f"a row's {field.name} is {value!r}")
    return rows
