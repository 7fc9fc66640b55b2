"""The kernel for more tokens where there is no wgmma, csrc/mma.cu: which launch takes a problem.

Legality is `refusal`; `plan` and `grouped_plan` change speed alone, and the order of sums.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.mma_config import WARP_TILES, WARPS, Config, configs, sums_bytes
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.backends.cuda.wgmma_estimate import tiles_of_expert
from kbit.format import layout

_FORMAT, _SUMS_FORMAT = "QQQQQQQQiiiiiiii", "QQQQiiiii"
_SPLITS = (1, 2, 4)  # parts of K for blocks of their own
# Clocks, fitted to 54 problems on an H200 to 6%: of a step beside its products, and of an MMA of one warp; of
# a byte of weights that all multiprocessors read at once; of a block; of what it stores a token; of a second
# launch, and of its sums' bytes.
_STEP, _MMA, _BYTE, _BLOCK, _STORE, _SECOND, _SUMS_BYTE = 640, 1.96, 0.062, 790, 111, 1670, 0.073


class Plan(NamedTuple):
    """A launch of mma.cu.

    Attributes:
        config: the kernel's compile-time choices.
        grid: blocks by rows, tokens and parts of K. More than one part takes a second launch, of mma_sums.cu.
    """

    config: Config
    grid: tuple[int, int, int]


def refusal(m: int, dtype: torch.dtype, out_features: int, silu_and_mul: bool) -> str | None:
    """Why the kernel may not take a problem, or None."""
    most = driver.MAX_GRID_Y * 32
    if m > most:
        return f"it takes up to {most} tokens, got {m}"
    return operands.refusal(dtype, out_features, silu_and_mul)


@functools.lru_cache(maxsize=4096)
def plan(m: int, weight: WeightShape) -> Plan:
    """The launch for a legal problem: the cheapest by estimate."""
    costs = {}
    for config in configs(weight.bits, weight.symmetric, weight.device.shared_bytes):
        blocks = _row_blocks(config, weight), -(-m // config.tokens)
        for splits in _SPLITS:
            if splits == 1 or 2 * splits <= _steps(config, weight):
                costs[Plan(config, (*blocks, splits))] = _clocks(
                    config, weight, blocks[0] * blocks[1], splits
                )
    return min(costs, key=lambda one: costs[one])


@functools.lru_cache(maxsize=4096)
def grouped_plan(m: int, experts: int, weight: WeightShape) -> Plan:
    """The launch for m rows of experts, dealt in some way."""
    costs = {}
    for config in configs(weight.bits, weight.symmetric, weight.device.shared_bytes, experts=True):
        rows = _row_blocks(config, weight)
        expected = round(experts * rows * tiles_of_expert(m, experts, config.tokens))
        most = rows * min(m, m // config.tokens + experts)
        grid = (min(most, weight.device.multiprocessors), 1, 1)
        costs[Plan(config, grid)] = _clocks(config, weight, max(1, expected), 1)
    return min(costs, key=lambda one: costs[one])


def _row_blocks(config: Config, weight: WeightShape) -> int:
    """Blocks that all rows of a weight take; gates and their ups are one warp's."""
    row_tiles, _, _ = layout.tile_shape(weight.out_features, weight.in_features, weight.bits)
    return -(-row_tiles // (WARP_TILES * config.row_warps))


def _steps(config: Config, weight: WeightShape) -> int:
    _, column_tiles, _ = layout.tile_shape(weight.out_features, weight.in_features, weight.bits)
    return -(-column_tiles // config.slices)


def _clocks(config: Config, weight: WeightShape, blocks: int, splits: int) -> float:
    """Estimated time of so many blocks for each part of K, in clocks of a multiprocessor."""
    busy = min(1.0, blocks * splits / weight.device.multiprocessors)
    mmas = WARPS * WARP_TILES * config.tokens // 2
    step_bytes = WARPS * WARP_TILES * 4 * layout.tile_words(weight.bits)
    step = _STEP + max(_MMA * mmas, _BYTE * busy * step_bytes)
    waves = -(-blocks * splits // weight.device.multiprocessors)
    found = waves * (_BLOCK + _STORE * config.tokens + _steps(config, weight) / splits * step)
    if splits > 1:
        found += _SECOND + _SUMS_BYTE * sums_bytes(config, blocks * splits) / weight.device.multiprocessors
    return found


@functools.lru_cache(maxsize=4096)  # because every launch looks its kernels up
def kernels_of(
    chosen: Plan, dtype: torch.dtype, weight: WeightShape, experts: bool = False
) -> tuple[KernelSpec, ...]:
    """The kernels of a launch, mma.cu first."""
    config = chosen.config
    first = config.spec(weight.bits, dtype, weight.symmetric, experts)
    return (first, config.sums_spec(dtype)) if chosen.grid[2] > 1 else (first,)


def linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
    chosen: Plan | None = None,
) -> None:
    """Launch the kernel on a legal problem; arguments as in `products.linear_tiled`."""
    weight = WeightShape.of(codebook, x.device.index, out_features, in_features, silu_and_mul)
    chosen = plan(x.shape[0], weight) if chosen is None else chosen
    config, (row_blocks, token_blocks, splits) = chosen
    sums = None
    if splits > 1:
        nbytes = sums_bytes(config, row_blocks * token_blocks * splits)
        sums = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    _launch(chosen, weight, x, (tiled, codebook, scale), bias, out, sums, None, 0)
    if sums is not None:
        index, threads = x.device.index, config.row_warps * driver.WARP
        kernel = launcher.load(kernels_of(chosen, x.dtype, weight)[1], index, _SUMS_FORMAT)
        sizes = (x.shape[0], out_features, int(silu_and_mul), int(_whole(out)), splits)
        args = (*operands.addresses(sums, scale, bias, out), *sizes)
        launcher.launch_on(index, kernel, (row_blocks, token_blocks, 1), threads, args, pdl=True)


def grouped_linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """Launch the kernel on a legal problem of experts; arguments as in `products.grouped_linear_tiled`."""
    weight = WeightShape.of(codebook, x.device.index, out_features, in_features, silu_and_mul)
    experts = tiled.shape[0]
    chosen = grouped_plan(x.shape[0], experts, weight)
    _launch(chosen, weight, x, (tiled, codebook, scale), None, out, None, offsets, experts)


def _launch(
    chosen: Plan,
    weight: WeightShape,
    x: torch.Tensor,
    quantized: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    sums: torch.Tensor | None,
    offsets: torch.Tensor | None,
    experts: int,
) -> None:
    config, index, x = chosen.config, x.device.index, operands.aligned_rows(x)
    kernel = launcher.load(kernels_of(chosen, x.dtype, weight, offsets is not None)[0], index, _FORMAT)
    sizes = (x.shape[0], weight.out_features, weight.in_features, x.shape[1], int(weight.gated))
    tiled, codebook, scale = quantized
    args = operands.addresses(tiled, codebook, scale, x, bias, out, sums, offsets)
    args = (*args, *sizes, int(_whole(out)), experts, _row_blocks(config, weight))
    threads, smem = WARPS * driver.WARP, config.shared_bytes(weight.bits)
    launcher.launch_on(index, kernel, chosen.grid, threads, args, smem=smem, pdl=True)


def _whole(out: torch.Tensor) -> bool:
    """Whether rows of a result are whole pieces of 16 bytes."""
    return out.shape[1] % operands.PIECE == 0 and out.data_ptr() % 16 == 0
