"""The kernels that convert weights, each alone: quantize, dequantize and change of layout, against bandwidth.

The second table of `kbit bench dequant`. GB/s count what is read and written, once.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from kbit.backends.cuda import rows
from kbit.bench import gpu_timing, shapes, targets
from kbit.bench.gpu_timing import Arm, GpuTiming
from kbit.bench.kernels import DTYPES, Plan
from kbit.bench.shapes import LayerShape
from kbit.bench.text_table import in_sections, text_table
from kbit.format import get_codebook
from kbit.format.codebook import midpoints

SHAPES = ("l8b", "l70b")  # 4096 x 14336 and 8192 x 28672: the sizes from which bandwidth is the measure
WAITING = "quantize, waited for"
_TARGETS = ("quantize", "dequantize", "dequantize tiles")


@dataclass(frozen=True)
class ConversionRow:
    """One kernel alone; `gb_s` counts the bytes that it has to read and to write.

    "quantize, waited for" is timed by the CPU's clock: the call as `kbit.quantize` makes it, with what the
    GPU idles while the CPU prepares it, and until the CPU knows that there was no NaN and no Inf.
    """

    kernel: str
    shape: str
    in_features: int
    out_features: int
    bits: int
    dtype: str
    us: float
    spread: float
    gb_s: float


class _Kept:
    """A call whose result lives until the next one, so that calls of a graph write to different memory.

    Else results of 30 MB would stay in a cache of 60 MB and never be written.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.result: object = None

    def __call__(self) -> None:
        self.result = self.call()


def _arms(dense: Sequence[torch.Tensor], bits: int) -> tuple[dict[str, Arm], dict[str, int], Arm]:
    """Arms by name, the bytes that each moves, and the arm of the call that waits; `dense` is overwritten."""
    w = dense[0]
    codebook = get_codebook("nf", bits).to(w.device)
    how = (codebook, midpoints(codebook), bits, None)
    packed, absmax, scale = rows.quantize(w, *how)
    copies = gpu_timing.cold_copies(packed.nbytes + absmax.nbytes)
    parts = [(packed.clone(), absmax.clone()) for _ in range(copies)]
    tiles = [rows.to_tiled(p, a, bits, w.shape[1]) for p, a in parts]
    calls: dict[str, list[Callable[[], object]]] = {
        "quantize": [functools.partial(rows.quantize_unchecked, w, *how) for w in dense],
        "tile": [functools.partial(rows.to_tiled, p, a, bits, w.shape[1]) for p, a in parts],
        "untile": [functools.partial(rows.from_tiled, t, bits, *w.shape) for t in tiles],
        "dequantize": [
            functools.partial(rows.dequantize, p, a, codebook, scale, w.shape[1], dense[i % len(dense)])
            for i, (p, a) in enumerate(parts)
        ],
        "dequantize tiles": [
            functools.partial(rows.dequantize_tiled, t, codebook, scale, bits, 0, dense[i % len(dense)])
            for i, t in enumerate(tiles)
        ],
    }
    few = packed.nbytes + absmax.nbytes
    nbytes = {name: 2 * few if name.endswith("tile") else w.nbytes + few for name in calls}
    waiting = Arm([_Kept(functools.partial(rows.quantize, w, *how)) for w in dense])
    return {name: Arm([_Kept(call) for call in each]) for name, each in calls.items()}, nbytes, waiting


def _waiting(arm: Arm, repeats: int) -> GpuTiming:
    """Calls that end with waiting for the GPU, by the CPU's clock."""
    gpu_timing.warm_up(arm)
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for call in arm.calls:
            call()
        samples.append(1e6 * (time.perf_counter() - start) / len(arm.calls))
    return gpu_timing.summarize(samples)


def shape_rows(shape: LayerShape, plan: Plan, device: str = "cuda") -> Iterator[ConversionRow]:
    """Measure every conversion of one shape, at every width of a plan."""
    generator = torch.Generator(device).manual_seed(0)
    size = (shape.out_features, shape.in_features)
    w = (torch.randn(size, generator=generator, device=device) * 0.02).to(DTYPES[plan.dtype])
    copies = gpu_timing.cold_copies(w.nbytes)
    for bits in plan.bits:
        arms, nbytes, waiting = _arms([w.clone() for _ in range(copies)], bits)
        results = {WAITING: _waiting(waiting, plan.repeats)} | plan.timer(arms, plan.repeats)
        for name in ("quantize", WAITING, *list(arms)[1:]):
            result = results[name]
            moved = nbytes[name.partition(",")[0]]
            yield ConversionRow(
                name,
                shape.name,
                shape.in_features,
                shape.out_features,
                bits,
                plan.dtype,
                result.us,
                result.spread,
                moved / result.us / 1e3,
            )


def measure(plan: Plan) -> Iterator[ConversionRow]:
    """Measure `SHAPES`."""
    for shape in shapes.select(SHAPES):
        yield from shape_rows(shape, plan)
        torch.cuda.empty_cache()


def tables(measured: Sequence[ConversionRow], bandwidth: float) -> Iterator[Table]:
    """A table per dtype; `bandwidth` in GB/s."""
    for dtype in dict.fromkeys(row.dtype for row in measured):
        headers = ("shape", "k", "kernel", "us", "spread", "GB/s", "% read")
        title, left = f"kernels over rows alone, {dtype}", ("shape", "kernel")
        table = text_table(title, headers, left, no_wrap=True)
        chosen = [row for row in measured if row.dtype == dtype]
        for row in in_sections(table, chosen, lambda row: (row.shape, row.bits)):
            times = f"{row.us:.1f}", f"{100 * row.spread:.0f}%", f"{row.gb_s:.0f}"
            table.add_row(row.shape, str(row.bits), row.kernel, *times, _share(row, bandwidth))
        yield table


def _share(row: ConversionRow, bandwidth: float) -> str:
    share = row.gb_s / bandwidth
    least = targets.dequantize_bandwidth(row.in_features * row.out_features)
    if least is None or row.kernel not in _TARGETS:
        return f"{100 * share:.0f}"
    return f"[{'green' if share >= least else 'red'}]{100 * share:.0f}[/]"


def as_json(measured: Sequence[ConversionRow], bandwidth: float) -> list[dict[str, Any]]:
    """Rows as JSON objects, with the share of `bandwidth` (GB/s)."""
    return [
        asdict(row)
        | {"us": round(row.us, 3), "spread": round(row.spread, 4), "gb_s": round(row.gb_s, 1)}
        | {"share_of_read_bandwidth": round(row.gb_s / bandwidth, 4)}
        for row in measured
    ]
