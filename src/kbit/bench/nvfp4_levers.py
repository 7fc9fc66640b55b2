"""Levers of NVFP4's kernels that change no bit: how they are cut into blocks, forced to every choice.

The quantizer's occupancy, a product's tile of tokens, and splits of K, which `exact` alone may have. Weights
are in layout "nv", whose kernels have the same tiles on every GPU. "chosen" is what calls get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from kbit.backends.cuda.nvfp4 import rows as kernels
from kbit.bench import gpu_timing
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.nvfp4 import (
    ACCUMULATIONS,
    DEVICE,
    QUANTIZE_COLUMNS,
    Measured,
    NVFP4Row,
    distinct_copies,
    rows_of,
    rows_to_quantize,
)
from kbit.bench.shapes import LayerShape
from kbit.nvfp4 import NVFP4Tensor, gemm_nvfp4, quantize_nvfp4, tiles_nvfp4

CHOSEN = "chosen"


def quantizer_rows(
    counts: Sequence[int], repeats: int, timer: Timer = gpu_timing.measure
) -> Iterator[NVFP4Row]:
    """The activation quantizer with search, bfloat16, in every cut.

    Raises:
        ValueError: a cut gives other bytes.
    """
    for count in counts:
        copies, nbytes = rows_to_quantize(count)
        want = quantize_nvfp4(copies[0]).nv()
        ways: dict[str, Callable[[torch.Tensor], object]] = {CHOSEN: quantize_nvfp4}
        for cut in kernels.CUTS:
            ways[cut] = functools.partial(_quantized, cut=cut)
            _require_same(want, _quantized(copies[0], cut), f"the quantizer, {cut}, at {count} rows")
        arms = {
            name: Measured(Arm([functools.partial(way, each) for each in copies]), nbytes, count)
            for name, way in ways.items()
        }
        yield from rows_of("occupancy", f"{QUANTIZE_COLUMNS} columns", count, arms, repeats, timer)


def _quantized(x: torch.Tensor, cut: str) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.quantize_cut(x, cut, True, False, 1.0)


def product_rows(
    shape: LayerShape, counts: Sequence[int], repeats: int, timer: Timer = gpu_timing.measure
) -> Iterator[NVFP4Row]:
    """Products of one shape under every contract, in every tile and split it may have.

    Raises:
        ValueError: a tile gives other bytes, under a contract that defines them.
    """
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (shape.out_features, shape.in_features)
    weights = distinct_copies(
        quantize_nvfp4(torch.randn(size, generator=generator, device=DEVICE).bfloat16())
    )
    for accum in ACCUMULATIONS:
        for count in counts:
            x = torch.randn(count, shape.in_features, generator=generator, device=DEVICE).bfloat16()
            a = quantize_nvfp4(x)
            arms = _arms(a, weights, accum)
            yield from rows_of("tiles", f"{shape.name}, {accum}", count, arms, repeats, timer)


def _arms(a: NVFP4Tensor, weights: Sequence[NVFP4Tensor], accum: str) -> dict[str, Measured]:
    nbytes = weights[0].nbytes + a.nbytes + 2 * a.shape[0] * weights[0].shape[0]
    want = gemm_nvfp4(a, weights[0], accum)
    arms = {}
    for tile in (None, *tiles_nvfp4(accum, DEVICE)):
        calls = [functools.partial(gemm_nvfp4, a, w, accum, tile=tile) for w in weights]
        if accum != "tc":
            _require_same([want], [calls[0]()], f"{accum}, {tile}, of {a.shape[0]} tokens")
        arms[tile or CHOSEN] = Measured(Arm(calls), nbytes)
    return arms


def _require_same(want: Sequence[torch.Tensor], have: Sequence[torch.Tensor], what: str) -> None:
    if not all(map(torch.equal, want, have)):
        raise ValueError(f"bench nvfp4: {what} differs from what calls get. This is a defect of kbit.")
