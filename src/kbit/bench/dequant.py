"""`kbit bench dequant`: what decoding to 16 bits in front of cuBLAS costs, the fallback for large M."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

import kbit.ops as ops
from kbit.bench import targets
from kbit.bench.gpu_timing import Arm
from kbit.bench.kernels import Plan, Weights, activations, decode_and_multiply, make_weights
from kbit.bench.shapes import LayerShape
from kbit.bench.text_table import in_sections, text_table


@dataclass(frozen=True)
class DequantizeRow:
    """Times in microseconds; `total_us` is measured in one go, so it gains where the copy stays in L2.

    `gb_s` counts packed bytes read and 16-bit bytes written.
    """

    shape: str
    in_features: int
    out_features: int
    rows: int
    bits: int
    dtype: str
    fp16_us: float
    dequantize_us: float
    total_us: float
    gb_s: float

    @property
    def ratio(self) -> float:
        """16-bit time / total: 1 is full 16-bit speed."""
        return self.fp16_us / self.total_us


def _arms(weights: Weights, x: torch.Tensor) -> dict[tuple[str, int], Arm]:
    arms = {("fp16", 16): Arm([functools.partial(F.linear, x, w) for w in weights.dense])}
    for bits, copies in weights.packed.items():
        arms["dequantize", bits] = Arm([functools.partial(ops.dequantize, q, x.dtype) for q in copies])
        arms["total", bits] = Arm([functools.partial(decode_and_multiply, x, q) for q in copies])
    return arms


def shape_rows(shape: LayerShape, plan: Plan) -> Iterator[DequantizeRow]:
    """Measure one shape at every M and width of a plan."""
    weights = make_weights(shape, plan)
    for count in plan.rows:
        x = activations(shape, count, plan)
        results = plan.timer(_arms(weights, x), plan.repeats)
        for bits, copies in weights.packed.items():
            decode = results["dequantize", bits].us
            nbytes = copies[0].nbytes + weights.dense[0].nbytes
            yield DequantizeRow(
                shape.name,
                shape.in_features,
                shape.out_features,
                count,
                bits,
                plan.dtype,
                results["fp16", 16].us,
                decode,
                results["total", bits].us,
                nbytes / decode / 1e3,
            )
    del weights
    torch.cuda.empty_cache()


def tables(rows: Sequence[DequantizeRow], bandwidth: float) -> Iterator[Table]:
    """A table per width; `bandwidth` in GB/s."""
    for bits in sorted({row.bits for row in rows}):
        chosen = [row for row in rows if row.bits == bits]
        dtype = chosen[0].dtype
        title = f"k={bits}: dequantize + cuBLAS, us"
        headers = ("shape", "M", dtype, "dequantize", "total", f"vs {dtype}", "GB/s", "% read")
        table = text_table(title, headers, left=("shape",), no_wrap=True)
        for row in in_sections(table, chosen, lambda row: row.shape):
            table.add_row(*_cells(row, bandwidth))
        yield table


def _cells(row: DequantizeRow, bandwidth: float) -> list[str]:
    share = row.gb_s / bandwidth
    least = targets.dequantize_bandwidth(row.in_features * row.out_features)
    text = f"{100 * share:.0f}"
    if least is not None:
        text = f"[{'green' if share >= least else 'red'}]{text}[/]"
    times = [f"{us:.1f}" for us in (row.fp16_us, row.dequantize_us, row.total_us)]
    return [row.shape, str(row.rows), *times, f"{row.ratio:.2f}x", f"{row.gb_s:.0f}", text]


def as_json(rows: Sequence[DequantizeRow]) -> list[dict[str, Any]]:
    """Rows as JSON objects, with the ratio."""
    digits = {"fp16_us": 3, "dequantize_us": 3, "total_us": 3, "gb_s": 1}
    return [
        asdict(row)
        | {name: round(getattr(row, name), n) for name, n in digits.items()}
        | {"ratio": round(row.ratio, 3)}
        for row in rows
    ]
