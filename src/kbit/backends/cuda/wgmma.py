"""The prefill kernel for Hopper, csrc/wgmma.cu: which configuration takes a problem, and its launch.

Legality is `arch_refusal` and `candidates`; `plan` is which of these is fastest by `wgmma_estimate`, where no
table of measurements says so (`kbit.backends.cuda.tables`). What is compiled: `wgmma_config`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda import wgmma_config as config
from kbit.backends.cuda import wgmma_estimate as estimate
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.tensor_map import activation_map, weight_map
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import nvfp4_layout
from kbit.format.layout import TILE_ROWS

ARCH = driver.HOPPER
_FORMAT = "QQQQQQTTiiiiiiiiii"
# Bytes of activations, a quarter of an H200's L2 cache, that stay there while the weight is read. With 8192
# columns and 4096 tokens, 64 MB, tiles in plain order took 10% longer.
_NEAR_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Plan:
    """A launch.

    Attributes:
        tiling: what a block takes, and how blocks work together.
        grid: blocks in all.
        teams: groups of warpgroups in a block; see `wgmma_config.Config`.
    """

    tiling: config.Tiling
    grid: int
    teams: int = 1


def arch_refusal(arch: str) -> str | None:
    """Why the kernel cannot run on an architecture, or None."""
    return None if arch == ARCH else f"it needs a Hopper GPU (sm_90), this is sm_{arch}"


@functools.lru_cache(maxsize=4096)
def plan(m: int, weight: WeightShape) -> Plan:
    """The launch for a legal problem: the cheapest by `wgmma_estimate`."""
    costs = candidates(m, weight)
    return min(costs, key=lambda plan: costs[plan])


@functools.lru_cache(maxsize=64)  # a decision asks several times
def candidates(m: int, weight: WeightShape) -> Mapping[Plan, float]:
    """Every launch that can take a legal problem, with its estimated clocks; see `wgmma_estimate`."""
    out_features, in_features, bits, gated, device, _ = weight
    plans = {}
    for cluster in driver.CLUSTER_SHARES:
        for block in config.blocks(bits, in_features, cluster, gated):
            tiling = block.tiling(cluster)
            tiles = _row_blocks(out_features, gated, tiling) * -(-m // block.tokens)
            size = cluster * tiling.sharers
            grid = size * max(1, min(tiles, device.clusters(size)))
            if cluster > 1 and (
                not block.splits(in_features, cluster) or estimate.alone(tiles, grid, cluster) == tiles
            ):
                continue
            plans[Plan(tiling, grid, block.teams)] = estimate.clocks(tiles, in_features, block, tiling, grid)
    return MappingProxyType(plans)


def plan_of(tiling: config.Tiling, m: int, weight: WeightShape) -> Plan | None:
    """The launch of a legal problem with a given tiling; None if that cannot take it."""
    return next((plan for plan in candidates(m, weight) if plan.tiling == tiling), None)


@functools.lru_cache(maxsize=4096)
def grouped_plan(m: int, experts: int, weight: WeightShape) -> Plan:
    """The launch for experts: the cheapest by `wgmma_estimate`."""
    out_features, in_features, bits, gated, device, _ = weight
    costs = {}
    for block in config.grouped_blocks(bits, gated):
        for cluster in driver.CLUSTER_SHARES:
            tiling = block.tiling(cluster)
            if cluster == 1 or block.splits(in_features, cluster):
                row_blocks = _row_blocks(out_features, gated, tiling)
                grid = cluster * device.clusters(cluster)
                costs[Plan(tiling, grid, block.teams)] = estimate.clocks_of_experts(
                    m, experts, row_blocks, in_features, block, tiling, grid
                )
    return min(costs, key=lambda plan: costs[plan])


def _row_blocks(out_features: int, gated: bool, tiling: config.Tiling) -> int:
    """Number of row blocks of W, or of pairs of them where blocks share activations in pairs."""
    halves = 2 if gated else 1
    return -(-(out_features // halves) // (tiling.rows // halves * tiling.sharers))


def near(columns: int, tokens: int, token_blocks: int) -> int:
    """How many token blocks' activations stay in the L2 cache while the weight is read; Problem::near."""
    return max(1, min(token_blocks, _NEAR_BYTES // (2 * columns * tokens)))


class Prepared(NamedTuple):
    """A launch of which all is decided but addresses; kept, for deciding takes longer than it.

    Attributes:
        prepared: the launch itself.
        weight_rows: row tiles of a box of the weight's tensor map.
        token_rows: rows of a box of the activations'.
        sizes: the kernel's arguments from N on.
    """

    prepared: launcher.Prepared
    weight_rows: int
    token_rows: int
    sizes: tuple[int, ...]

    def launch(
        self,
        x: torch.Tensor,
        tiled: torch.Tensor,
        codebook: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        row_scale: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ) -> None:
        """Launch on the device's current stream.

        Args:
            x: [..., K], contiguous, rows at multiples of 16 bytes.
            tiled: int32 [row tiles, column tiles, words], at 16 bytes too; those of experts one after the
                other.
            codebook, scale, bias, out: as in `products.linear_tiled`.
            row_scale: float32 [M], factors of the result's rows.
            offsets: of experts; see `products.grouped_linear_tiled`.
        """
        where = operands.addresses(codebook, scale, bias, row_scale, out, offsets)
        maps = weight_map(tiled, self.weight_rows), activation_map(x, self.token_rows)
        self.prepared.launch((*where, *maps, *self.sizes))


def prepare(
    device_index: int,
    chosen: Plan,
    m: int,
    dtype: torch.dtype,
    weight: WeightShape,
    experts: int = 0,
    nvfp4: bool = False,
) -> Prepared:
    """A planned launch on a device, where the kernel is compiled and loaded if it was not.

    Args:
        device_index: as torch counts devices.
        chosen: the plan.
        m: M.
        dtype: of activations.
        weight: that of one expert.
        experts: how many; 0 for one weight.
        nvfp4: whether tiles are NVFP4's.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    out_features, in_features, bits, gated, _, symmetric = weight
    tiling = chosen.tiling
    block = _block(chosen, bits, experts, nvfp4)
    row_blocks, token_blocks = _row_blocks(out_features, gated, tiling), -(-m // tiling.tokens)
    by_one = estimate.alone(row_blocks * token_blocks, chosen.grid, tiling.cluster)
    near_ones = near(in_features, tiling.tokens, token_blocks)
    rows = -(-out_features // TILE_ROWS)
    steps = block.steps_of(in_features)
    sizes = (out_features, m, experts, steps, rows, row_blocks, token_blocks, by_one, near_ones, int(gated))
    kernel, grid = (
        launcher.load(config.spec(block, dtype, symmetric), device_index, _FORMAT),
        (chosen.grid, 1, 1),
    )
    smem, cluster = config.shared_bytes(block), tiling.cluster * tiling.sharers
    launch = launcher.Prepared(device_index, kernel, grid, block.threads, smem, cluster)
    weight_rows = tiling.rows // TILE_ROWS // (2 if gated else 1)
    return Prepared(launch, weight_rows, tiling.tokens // tiling.sharers, sizes)


def kernel_of(
    chosen: Plan, dtype: torch.dtype, weight: WeightShape, experts: int = 0, nvfp4: bool = False
) -> KernelSpec:
    """The kernel of a plan; experts: how many, 0 for one weight."""
    return config.spec(_block(chosen, weight.bits, experts, nvfp4), dtype, weight.symmetric)


def _block(chosen: Plan, bits: int, experts: int, nvfp4: bool = False) -> config.Config:
    return config.of_tiling(bits, chosen.tiling, chosen.teams, experts > 0, nvfp4)


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
    row_scale: torch.Tensor | None = None,
) -> None:
    """Launch the kernel on a legal problem; arguments as in `products.linear_tiled`.

    Tiles of NVFP4 are told from others by their size. row_scale, float32 [M], multiplies rows of the result.
    """
    index = x.device.index
    weight = WeightShape.of(codebook, index, out_features, in_features, silu_and_mul)
    chosen = plan(x.shape[0], weight) if chosen is None else chosen
    one = prepare(index, chosen, x.shape[0], x.dtype, weight, nvfp4=nvfp4_layout.is_nvfp4(tiled))
    one.launch(operands.aligned_rows(x), tiled, codebook, scale, bias, out, row_scale)


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
    chosen: Plan | None = None,
) -> None:
    """Launch the kernel on a legal problem of experts; arguments as in `products.grouped_linear_tiled`.

    Tiles of NVFP4 are told from others by their size.
    """
    index, experts = x.device.index, tiled.shape[0]
    weight = WeightShape.of(codebook, index, out_features, in_features, silu_and_mul)
    chosen = grouped_plan(x.shape[0], experts, weight) if chosen is None else chosen
    nvfp4 = nvfp4_layout.is_nvfp4(tiled)
    one = prepare(index, chosen, x.shape[0], x.dtype, weight, experts, nvfp4)
    all_tiles = tiled.flatten(0, 1)
    one.launch(operands.aligned_rows(x), all_tiles, codebook, scale, None, out, offsets=offsets)
