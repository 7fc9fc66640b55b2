"""A layer of experts in NVFP4: four ways to quantize for it, folds, and every kernel alone.

Hidden size 2048, 256 experts of width 512 of which a token takes 8, and a shared one; uniform routing and
Zipf's. The experts that calls take differ from call to call, so that weights are cold at few tokens, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kbit.backends.cuda.nvfp4 import ahead
from kbit.bench import gpu_timing
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.nvfp4 import DEVICE, Measured, NVFP4Row, rows_of
from kbit.bench.routings import chosen_experts
from kbit.nvfp4 import (
    NVFP4Tensor,
    gemm_nvfp4,
    moe_align,
    quantize_nvfp4,
    repack_nvfp4,
    rmsnorm,
    rmsnorm_quantize_nvfp4,
    silu_mul,
    silu_mul_quantize_nvfp4,
)
from kbit.nvfp4.expert_products import expert_product
from kbit.nvfp4.moe import (
    DEDUP,
    ExpertInput,
    Routing,
    combine_sorted,
    gather_rows,
    quantize_for_experts,
    route,
)

EPS = 1e-6
_FEWEST_CALLS, _MOST_CALLS = 4, 64


@dataclass(frozen=True)
class LayerSize:
    """Sizes of the layer."""

    hidden: int = 2048
    experts: int = 256
    chosen: int = 8
    width: int = 512


@dataclass(frozen=True)
class Layer:
    """Weights: gates and ups, and down projections, of the experts and of the shared one; the norm."""

    gate_up: NVFP4Tensor
    down: NVFP4Tensor
    shared_gate_up: NVFP4Tensor
    shared_down: NVFP4Tensor
    norm: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """What a call of the layer gets."""

    x: torch.Tensor
    residual: torch.Tensor
    ids: torch.Tensor
    p: torch.Tensor


def make_layer(size: LayerSize, seed: int) -> Layer:
    """Random weights on the GPU, in the form that layers hold there under `exact` and `tc`."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def weight(tiled: bool, *shape: int) -> NVFP4Tensor:
        w = torch.randn(shape, generator=generator, device=DEVICE)
        t = quantize_nvfp4((0.02 * w).bfloat16(), search=False)
        return repack_nvfp4(t, "tiled") if tiled else t

    gates, width, hidden = 2 * size.width, size.width, size.hidden
    tiled = ahead.take_tiles(size.experts, (hidden, width), torch.device(DEVICE))
    experts = weight(tiled, size.experts, gates, hidden), weight(tiled, size.experts, hidden, width)
    shared = weight(True, gates, hidden), weight(True, hidden, width)
    return Layer(*experts, *shared, torch.ones(hidden, device=DEVICE))


def make_batch(size: LayerSize, tokens: int, routing: str, seed: int) -> Batch:
    """Random tokens, and experts as `chosen_experts` chooses them."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.Generator().manual_seed(0)
    ids = chosen_experts(routing, tokens, size.experts, size.chosen, generator, order)
    p = torch.rand(tokens, size.chosen, generator=generator)
    x, residual = (torch.randn(tokens, size.hidden, generator=generator).bfloat16() for _ in range(2))
    return Batch(x.to(DEVICE), residual.to(DEVICE), ids.int().to(DEVICE), (p / p.sum(1, True)).to(DEVICE))


def run_layer(layer: Layer, batch: Batch, dedup: str, accum: str, fold: bool) -> torch.Tensor:
    """Norm, routing, experts, shared expert, weighted sum.

    Args:
        layer: weights.
        batch: activations, and what the router chose; the norm that it would read is written in any case.
        dedup: how experts get activations. "gather" and "indirect" use what the shared expert reads.
        accum: the contract.
        fold: quantize in the kernels that produce.
    """
    if fold:
        normed = rmsnorm_quantize_nvfp4(batch.x, layer.norm, EPS, batch.residual)
        quantized, norm = normed.quantized, normed.norm
    else:
        norm, _ = rmsnorm(batch.x, layer.norm, EPS, batch.residual)
        quantized = quantize_nvfp4(norm)
    routing = route(batch.ids, layer.gate_up.shape[0])
    if dedup == "indirect":
        a = ExpertInput(quantized, routing.source, 0, 0)
    elif dedup == "gather":
        a = ExpertInput(gather_rows(quantized, routing.source), None, 0, 0)
    else:
        assert norm is not None
        a = quantize_for_experts(norm, routing, dedup)
    hidden = _activate(expert_product(a, routing, layer.gate_up, accum), fold)
    down = ExpertInput(hidden, None, 0, 0)
    y = combine_sorted(expert_product(down, routing, layer.down, accum), routing.inverse, batch.p)
    shared = _activate(gemm_nvfp4(quantized, layer.shared_gate_up, accum), fold)
    return y + gemm_nvfp4(shared, layer.shared_down, accum)


def _activate(gate_up: torch.Tensor, fold: bool) -> NVFP4Tensor:
    return silu_mul_quantize_nvfp4(gate_up) if fold else quantize_nvfp4(silu_mul(gate_up))


def _calls_for(size: LayerSize, layer: Layer, tokens: int) -> int:
    """Calls with different experts until the weights they read are several caches large."""
    share = min(1.0, tokens * size.chosen / size.experts)
    read = int(share * (layer.gate_up.nbytes + layer.down.nbytes))
    wanted = -(-gpu_timing.CACHE_FACTOR * gpu_timing.l2_bytes() // max(1, read))
    return max(_FEWEST_CALLS, min(_MOST_CALLS, wanted))


def layer_rows(
    tokens: Sequence[int],
    routings: Sequence[str],
    accums: Sequence[str],
    repeats: int,
    timer: Timer = gpu_timing.measure,
    size: LayerSize | None = None,
) -> Iterator[NVFP4Row]:
    """End to end: the four ways without folds, and the indirect one with; then every kernel alone."""
    size = size or LayerSize()
    layers = [make_layer(size, seed) for seed in range(2)]
    for routing in routings:
        for count in tokens:
            calls = _calls_for(size, layers[0], count)
            batches = [make_batch(size, count, routing, seed) for seed in range(calls)]
            for accum in accums:
                arms = _layer_arms(size, layers, batches, accum)
                yield from rows_of("layer", f"{routing}, {accum}", count, arms, repeats, timer)
                arms = _kernel_arms(size, layers, batches, accum)
                yield from rows_of("kernels", f"{routing}, {accum}", count, arms, repeats, timer)


def _layer_arms(
    size: LayerSize, layers: list[Layer], batches: list[Batch], accum: str
) -> dict[str, Measured]:
    tokens = len(batches[0].x)
    slots = tokens * size.chosen
    read = _bytes_read(layers[0], batches)
    arms = {}
    for name, dedup, fold in (
        *((dedup, dedup, False) for dedup in DEDUP),
        ("indirect, folded", "indirect", True),
    ):
        calls: list[Callable[[], object]] = [
            functools.partial(run_layer, layers[i % len(layers)], batch, dedup, accum, fold)
            for i, batch in enumerate(batches)
        ]
        # What the shared expert reads counts, too.
        quantized = {"off": slots + tokens, "scatter": 2 * tokens}.get(dedup, tokens)
        copied = slots if dedup in ("gather", "scatter") else 0
        arms[name] = Measured(Arm(calls), read, quantized, copied)
    return arms


def _bytes_read(layer: Layer, batches: list[Batch]) -> int:
    """Weights of the experts that are chosen, mean of the calls, and of the shared one."""
    used = sum(batch.ids.unique().numel() for batch in batches) / len(batches)
    own = (layer.gate_up.nbytes + layer.down.nbytes) / layer.gate_up.shape[0]
    return int(used * own) + layer.shared_gate_up.nbytes + layer.shared_down.nbytes


@dataclass(frozen=True)
class _Stages:
    """What the kernels of one call read, made beforehand."""

    layer: Layer
    batch: Batch
    routing: Routing
    inputs: dict[str, ExpertInput]
    gate_up: torch.Tensor
    hidden: ExpertInput
    y: torch.Tensor


def _stages(layer: Layer, batch: Batch, accum: str) -> _Stages:
    routing = route(batch.ids, layer.gate_up.shape[0])
    inputs = {dedup: quantize_for_experts(batch.x, routing, dedup) for dedup in ("off", "indirect")}
    gate_up = expert_product(inputs["off"], routing, layer.gate_up, accum)
    hidden = ExpertInput(silu_mul_quantize_nvfp4(gate_up), None, len(routing.source), 0)
    y = expert_product(hidden, routing, layer.down, accum)
    return _Stages(layer, batch, routing, inputs, gate_up, hidden, y)


def _kernel_arms(
    size: LayerSize, layers: list[Layer], batches: list[Batch], accum: str
) -> dict[str, Measured]:
    stages = [_stages(layers[i % len(layers)], batch, accum) for i, batch in enumerate(batches)]
    tokens = len(batches[0].x)
    slots, hidden, width = tokens * size.chosen, size.hidden, size.width
    dense, packed = 2 * hidden, hidden * 9 // 16  # bytes of a row
    experts = _bytes_read(layers[0], batches)
    share = layers[0].gate_up.nbytes / (layers[0].gate_up.nbytes + layers[0].down.nbytes)
    up, down = int(experts * share), int(experts * (1 - share))
    y_bytes, mid_bytes = slots * dense, slots * 4 * width

    def arm(call: Callable[[_Stages], object], nbytes: int, quantized: int = 0, copied: int = 0) -> Measured:
        return Measured(Arm([functools.partial(call, each) for each in stages]), nbytes, quantized, copied)

    def quantizer(dedup: str) -> Callable[[_Stages], object]:
        return lambda s: quantize_for_experts(s.batch.x, s.routing, dedup)

    def product(dedup: str) -> Callable[[_Stages], object]:
        return lambda s: expert_product(s.inputs[dedup], s.routing, s.layer.gate_up, accum)

    once = tokens * (dense + packed)
    return {
        "align": arm(lambda s: moe_align(s.batch.ids, size.experts), 20 * slots),
        "quantize off": arm(quantizer("off"), slots * (2 * dense + dense + packed), slots),
        "quantize gather": arm(quantizer("gather"), once + 2 * slots * packed, tokens, slots),
        "quantize scatter": arm(quantizer("scatter"), tokens * dense + slots * packed, tokens, slots),
        "quantize indirect": arm(quantizer("indirect"), once, tokens),
        "gate_up direct": arm(product("off"), up + slots * packed + mid_bytes),
        "gate_up indirect": arm(product("indirect"), up + slots * packed + mid_bytes),
        "silu, quantize": arm(lambda s: quantize_nvfp4(silu_mul(s.gate_up)), mid_bytes * 2, slots),
        "silu folded": arm(lambda s: silu_mul_quantize_nvfp4(s.gate_up), mid_bytes, slots),
        "down": arm(lambda s: expert_product(s.hidden, s.routing, s.layer.down, accum), down + y_bytes),
        "combine": arm(lambda s: combine_sorted(s.y, s.routing.inverse, s.batch.p), y_bytes + tokens * dense),
    }
