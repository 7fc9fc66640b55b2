"""`kbit bench nvfp4`: the activation quantizer's bandwidth, and products against bf16 cuBLAS.

The layer of experts, with the four ways to quantize for it, is in `kbit.bench.nvfp4_layer`; the same kernels
cut into other blocks in `kbit.bench.nvfp4_levers`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kbit.bench import gpu_timing
from kbit.bench.correctness import require_close
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.shapes import LayerShape
from kbit.nvfp4 import (
    NVFP4Tensor,
    dequantize_nvfp4,
    gemm_nvfp4,
    linear_nvfp4,
    quantize_nvfp4,
    repack_nvfp4,
)
from kbit.nvfp4.gemm import TILED_ACCUMULATIONS

DEVICE = "cuda"
CUBLAS, DEQUANTIZE = "bf16 cuBLAS", "dequantize + cuBLAS"
UNTILED, WEIGHT_ONLY, OUTLIERS = "{}, layout nv", "W4A16", "exact, outliers"
ACCUMULATIONS = ("tc", "seq16", "exact")
QUANTIZE_COLUMNS = 2048
# Channels of activations that stand out: every so manieth, by so much.
OUTLIER_EVERY, OUTLIER_FACTOR = 512, 30.0


@dataclass(frozen=True)
class NVFP4Row:
    """One measurement.

    Attributes:
        part: "quantize", "gemm", "layer", "kernels", "occupancy" or "tiles".
        problem: shape or routing.
        rows: M, or the tokens T of a layer.
        arm: what was run.
        us: median microseconds of a call.
        spread: (max - min) / median.
        nbytes: that a call has to read and write, each once.
        quantized_rows, copied_rows: rows that the quantizer took, and that were copied or stored again.
    """

    part: str
    problem: str
    rows: int
    arm: str
    us: float
    spread: float
    nbytes: int
    quantized_rows: int = 0
    copied_rows: int = 0

    @property
    def gb_s(self) -> float:
        """Bytes over time."""
        return self.nbytes / self.us / 1e3 if self.us else 0.0


@dataclass(frozen=True)
class Measured:
    """An arm and what is known of it beforehand."""

    arm: Arm
    nbytes: int
    quantized_rows: int = 0
    copied_rows: int = 0


def rows_of(
    part: str, problem: str, count: int, arms: dict[str, Measured], repeats: int, timer: Timer
) -> Iterator[NVFP4Row]:
    """Measure arms against each other, in the order given."""
    timings = timer({name: each.arm for name, each in arms.items()}, repeats)
    for name, timing in timings.items():
        known = arms[name]
        numbers = (known.nbytes, known.quantized_rows, known.copied_rows)
        yield NVFP4Row(part, problem, count, name, timing.us, timing.spread, *numbers)


def quantize_rows(
    counts: Sequence[int], repeats: int, timer: Timer = gpu_timing.measure
) -> Iterator[NVFP4Row]:
    """The activation quantizer, bfloat16 to nv, with and without searching scales and factors of rows."""
    for count in counts:
        copies, nbytes = rows_to_quantize(count)
        arms = {}
        for row_scale, (name, search) in itertools.product(
            (False, True), (("search", True), ("plain", False))
        ):
            quantize = functools.partial(quantize_nvfp4, search=search, row_scale=row_scale)
            arm = Arm([functools.partial(quantize, each) for each in copies])
            of_factors = 4 * count if row_scale else 0
            arms[f"{name}, row scales" if row_scale else name] = Measured(arm, nbytes + of_factors, count)
        yield from rows_of("quantize", f"{QUANTIZE_COLUMNS} columns", count, arms, repeats, timer)


def rows_to_quantize(count: int) -> tuple[list[torch.Tensor], int]:
    """Rows as often as it takes for calls in turn to find them cold, and the bytes that a call moves."""
    x = torch.randn(count, QUANTIZE_COLUMNS, device=DEVICE).bfloat16()
    copies = [x.clone() for _ in range(gpu_timing.cold_copies(x.nbytes))]
    return copies, x.nbytes + count * QUANTIZE_COLUMNS * 9 // 16


def gemm_rows(
    shape: LayerShape, counts: Sequence[int], repeats: int, timer: Timer = gpu_timing.measure
) -> Iterator[NVFP4Row]:
    """Products of one shape: bfloat16, W4A16 decoded and tiled, W4A4 under each contract, tiled if it can be.

    `exact` is measured with outlying channels, too, which float32 chains of products have less room for.

    Raises:
        ValueError: a kernel computes something else.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (shape.out_features, shape.in_features)
    dense = torch.randn(size, generator=generator, device=DEVICE).bfloat16()
    packed = quantize_nvfp4(dense)
    weights = distinct_copies(packed)
    tiled = [repack_nvfp4(each, "tiled") for each in weights]
    dense_copies = [dense.clone() for _ in range(gpu_timing.cold_copies(dense.nbytes))]
    for count in counts:
        x = torch.randn(count, shape.in_features, generator=generator, device=DEVICE).bfloat16()
        arms = _gemm_arms(x, dense_copies, weights, tiled)
        _check(shape, x, packed)
        yield from rows_of("gemm", shape.name, count, arms, repeats, timer)
    del weights, tiled, dense_copies
    torch.cuda.empty_cache()


def distinct_copies(t: NVFP4Tensor) -> list[NVFP4Tensor]:
    """A weight in layout "nv" as often as it takes for calls in turn to find it cold."""
    codes, scales = t.nv()
    count = gpu_timing.cold_copies(t.nbytes)
    return [NVFP4Tensor(codes.clone(), scales.clone(), t.global_scale, t.shape) for _ in range(count)]


def _gemm_arms(
    x: torch.Tensor, dense: list[torch.Tensor], weights: list[NVFP4Tensor], tiled: list[NVFP4Tensor]
) -> dict[str, Measured]:
    a = quantize_nvfp4(x)
    y_bytes = 2 * x.shape[0] * dense[0].shape[0]
    w_bytes = weights[0].nbytes
    cublas = Arm([functools.partial(F.linear, x, w) for w in dense])
    arms = {
        CUBLAS: Measured(cublas, dense[0].nbytes + x.nbytes + y_bytes),
        DEQUANTIZE: Measured(Arm([_decoded(x, w) for w in weights]), w_bytes + x.nbytes + y_bytes),
    }
    for accum in ACCUMULATIONS:
        forms = {accum: weights}
        if accum in TILED_ACCUMULATIONS:
            forms = {accum: tiled, UNTILED.format(accum): weights}
        for name, copies in forms.items():
            calls = [functools.partial(gemm_nvfp4, a, w, accum) for w in copies]
            arms[name] = Measured(Arm(calls), w_bytes + a.nbytes + y_bytes)
    spread = quantize_nvfp4(_with_outliers(x))
    calls = [functools.partial(gemm_nvfp4, spread, w, "exact") for w in tiled]
    arms[OUTLIERS] = Measured(Arm(calls), w_bytes + a.nbytes + y_bytes)
    weight_only = Arm([functools.partial(linear_nvfp4, x, w) for w in tiled])
    arms[WEIGHT_ONLY] = Measured(weight_only, w_bytes + x.nbytes + y_bytes)
    both = Arm([_quantized(x, w) for w in tiled])
    arms["quantize + tc"] = Measured(both, w_bytes + x.nbytes + 2 * a.nbytes + y_bytes, x.shape[0])
    return arms


def _with_outliers(x: torch.Tensor) -> torch.Tensor:
    """The same with channels as large as those that stand out in language models."""
    y = x.clone()
    y[:, OUTLIER_EVERY // 2 :: OUTLIER_EVERY] *= OUTLIER_FACTOR
    return y


def _decoded(x: torch.Tensor, w: NVFP4Tensor) -> Callable[[], torch.Tensor]:
    return lambda: F.linear(x, dequantize_nvfp4(w, x.dtype))


def _quantized(x: torch.Tensor, w: NVFP4Tensor) -> Callable[[], torch.Tensor]:
    """Quantize and multiply as layers do, with factors of rows."""
    return lambda: gemm_nvfp4(quantize_nvfp4(x, row_scale=True), w, "tc")


def _check(shape: LayerShape, x: torch.Tensor, w: NVFP4Tensor) -> None:
    a = quantize_nvfp4(x)
    expected = dequantize_nvfp4(a, torch.float32) @ dequantize_nvfp4(w, torch.float32).t()
    tiled = repack_nvfp4(w, "tiled")
    results = {accum: gemm_nvfp4(a, w, accum) for accum in ACCUMULATIONS}
    for accum in TILED_ACCUMULATIONS:
        results |= {UNTILED.format(accum): results[accum], accum: gemm_nvfp4(a, tiled, accum)}
    results[WEIGHT_ONLY] = linear_nvfp4(dequantize_nvfp4(a, x.dtype), tiled)
    for accum, y in results.items():
        require_close(f"bench nvfp4: {accum}", y, expected, f"{shape.name} at M={x.shape[0]}")


def as_json(rows: Sequence[NVFP4Row]) -> list[dict[str, Any]]:
    """Rows as JSON objects, with GB/s, and for products the speed-up over bf16 cuBLAS of the same run."""
    base = {(row.part, row.problem, row.rows): row.us for row in rows if row.arm == CUBLAS}
    result = []
    for row in rows:
        item = asdict(row) | {"us": round(row.us, 3), "spread": round(row.spread, 3)}
        item["gb_s"] = round(row.gb_s, 1)
        reference = base.get((row.part, row.problem, row.rows))
        item["vs_bf16"] = round(reference / row.us, 3) if reference and row.us else None
        result.append(item)
    return result
