"""The small-batch kernel, csrc/stream.cu: which configuration takes a problem, and its launch.

Legality is `refusal`; `plan` lays out what stream_preference.py chooses, which changes speed alone: results
depend on N, K, the GPU and whether there are 1, 2, 3 or 4, 5 to 8 or more tokens (of NVFP4 2, 3 or 4, too).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.stream_config import (
    DENSE,
    GROUP_TILES,
    MEASURED_ARCH,
    TOKENS,
    Config,
    classes,
    configs,
    kernel_of,
    sums_of,
)
from kbit.backends.cuda.stream_preference import choose
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import layout, nvfp4_layout

_FORMAT = "QQQQQQiiiiiiiiQQQiiiiiQ"
GROUP_COLUMNS = layout.TILE_COLUMNS * GROUP_TILES
_BARRIER_BYTES = 1024
_ROW_BYTES = 128  # of 32 sums


@dataclass(frozen=True)
class Plan:
    """A launch. Places in shared memory are byte offsets, as the header of stream.cu lays it out.

    Attributes:
        config: the kernel's compile-time choices.
        tokens: most tokens that the kernel is compiled for.
        grid: blocks.
        workers: warps of a block that split K; one more adds up their sums.
        ring_at: where tiles in flight are.
        parts_at: where the workers' partial sums are.
        totals_at: where totals are kept, of gates and between passes over K.
        exchange_at: where the sums of a cluster's blocks are.
        cluster: blocks that share row tiles and split K.
        shared_bytes: dynamic shared memory of a block.
    """

    config: Config
    tokens: int
    grid: int
    workers: int
    ring_at: int
    parts_at: int
    totals_at: int
    exchange_at: int
    cluster: int
    shared_bytes: int


def refusal(m: int, dtype: torch.dtype, out_features: int, silu_and_mul: bool) -> str | None:
    """Why the kernel may not take a problem, or None."""
    if not 1 <= m <= TOKENS[-1]:
        return f"it takes 1 to {TOKENS[-1]} tokens, got {m}"
    return operands.refusal(dtype, out_features, silu_and_mul)


@functools.lru_cache(maxsize=4096)
def plan(m: int, weight: WeightShape, nvfp4: bool = False, experts: int = DENSE) -> Plan:
    """The launch for a legal problem."""
    out_features, in_features, bits, gated, device, symmetric = weight
    tokens = next(t for t in classes(nvfp4) if t >= m)
    row_tiles, column_tiles, _ = layout.tile_shape(out_features, in_features, bits)
    groups = -(-column_tiles // GROUP_TILES)
    units = row_tiles // 2 if gated else row_tiles
    available = configs(bits, tokens, device.shared_bytes, device.arch, experts, nvfp4, symmetric)
    wanted, config = choose(available, m, groups, units / device.multiprocessors, bits)
    cluster = wanted.cluster
    groups = -(-column_tiles // (config.group_tiles * cluster))
    passes = -(-groups // min(wanted.workers, config.workers))
    # All passes are of one size, and the table wants several warps to fill it.
    workers = max(-(-groups // passes), min(8, config.workers))
    tile_bytes = 4 * operands.tile_words(bits, nvfp4)
    work = _Work(config, tokens, units, gated, passes, workers, cluster, bits, tile_bytes)
    grid = min(units, wanted.blocks * device.clusters(cluster))
    if wanted.blocks * work.dealt_to(grid).shared_bytes > device.shared_bytes:
        grid = min(units, device.clusters(cluster))
    # Fewer row tiles a block have fewer totals to keep.
    while work.dealt_to(grid).shared_bytes > device.shared_bytes and grid < units:
        grid = min(units, 2 * grid)
    chosen = work.dealt_to(grid)
    if not (device.arch == MEASURED_ARCH and wanted.blocks == cluster == 1):
        return chosen
    if 2 * grid <= device.multiprocessors:
        return chosen
    return replace(chosen, shared_bytes=max(chosen.shared_bytes, _exclusive_bytes(device)))


def _exclusive_bytes(device: driver.DeviceLimits) -> int:
    """Shared memory of a block beside which there is no room for another.

    With programmatic dependent launch blocks start while the previous kernels' still run, and go where there
    is room: two on some multiprocessors, none on others. Behind a norm, 12352 x 2048 by 4 tokens took 8.9 us
    instead of 6.8.
    """
    return device.shared_bytes // 2 + 1024


@dataclass(frozen=True)
class _Work:
    """A problem whose K is split: over the blocks of a cluster, passes, and workers.

    Attributes:
        units: row tiles, or pairs of them if gated.
        tile_bytes: size of a packed tile.
    """

    config: Config
    tokens: int
    units: int
    gated: bool
    passes: int
    workers: int
    cluster: int
    bits: int
    tile_bytes: int

    def dealt_to(self, clusters: int) -> Plan:
        """Shared memory: table, barriers, ring, parts, totals, exchange; as the header of stream.cu says."""
        config, tokens, workers, cluster = self.config, self.tokens, self.workers, self.cluster
        rows, row_bytes = -(-self.units // clusters), (2 if self.gated else 1) * sums_of(tokens) * _ROW_BYTES
        ring_at = operands.TABLE_BYTES + _BARRIER_BYTES
        parts_at = ring_at + workers * config.stages * config.group_tiles * self.tile_bytes
        parts = config.buffers(tokens) * workers * sums_of(tokens) * _ROW_BYTES
        totals_at = parts_at + (0 if config.in_holes(self.bits, tokens) else parts)
        keeps = self.gated or (self.passes > 1 and rows > 1)
        exchange_at = totals_at + (rows * row_bytes if keeps else 0)
        end = exchange_at + (-(-rows // cluster) * cluster * row_bytes if cluster > 1 else 0)
        grid = clusters * cluster
        return Plan(config, tokens, grid, workers, ring_at, parts_at, totals_at, exchange_at, cluster, end)


class Routing(NamedTuple):
    """A token's experts for the kernel, as `Routing` in stream.cuh: addresses, numbers and widths."""

    ids: int = 0
    weights: int = 0
    slots: int = 0
    experts: int = 0
    wide_ids: int = 0
    wide_weights: int = 0


NO_ROUTING = Routing()


class Prepared(NamedTuple):
    """A launch of which all is decided but addresses and routing; kept, for deciding takes longer than it.

    Attributes:
        prepared: the launch itself.
        sizes: arguments of the kernel: N, K, tokens, elements from a row of x to the next, whether it is
            gated, and the places of ring, parts and totals.
        exchange_at: one more place.
    """

    prepared: launcher.Prepared
    sizes: tuple[int, ...]
    exchange_at: int

    def launch(
        self,
        x: torch.Tensor,
        tiled: torch.Tensor,
        codebook: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        row_scale: torch.Tensor | None = None,
        x_scales: torch.Tensor | None = None,
        routing: Routing = NO_ROUTING,
    ) -> None:
        """Launch on the device's current stream.

        Args:
            x: [..., K] in 16 bits or, with x_scales, NVFP4's codes [M, K / 2]; contiguous, rows at multiples
                of 16 bytes.
            tiled: at 16 bytes too.
            codebook, scale, bias, out: as in `products.linear_tiled`.
            row_scale: float32 [M], factors of the result's rows.
            x_scales: of the codes, at 16 bytes.
            routing: of one token's experts.
        """
        where = operands.addresses(tiled, codebook, scale, x, bias, out)
        factors_at, scales_at = operands.addresses(row_scale, x_scales)
        self.prepared.launch((*where, *self.sizes, factors_at, *routing, self.exchange_at, scales_at))


def prepare(
    device_index: int,
    chosen: Plan,
    spec: KernelSpec,
    m: int,
    out_features: int,
    in_features: int,
    gated: bool,
) -> Prepared:
    """A planned launch on a device, where the kernel is compiled and loaded if it was not.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    places = (chosen.ring_at, chosen.parts_at, chosen.totals_at)
    stride = operands.padded(in_features)
    kernel, threads = launcher.load(spec, device_index, _FORMAT), (chosen.workers + 1) * driver.WARP
    grid = (chosen.grid, 1, 1)
    launch = launcher.Prepared(device_index, kernel, grid, threads, chosen.shared_bytes, chosen.cluster)
    sizes = (out_features, in_features, m, stride, int(gated), *places)
    return Prepared(launch, sizes, chosen.exchange_at)


@functools.lru_cache(maxsize=4096)
def prepared(
    device_index: int,
    m: int,
    dtype: torch.dtype,
    weight: WeightShape,
    nvfp4: bool = False,
    coded: bool = False,
) -> Prepared:
    """The launch for a legal problem of one launch; see `linear`, where x_scales make it `coded`."""
    chosen, spec = planned(m, dtype, weight, nvfp4, coded)
    return prepare(device_index, chosen, spec, m, weight.out_features, weight.in_features, weight.gated)


def planned(
    m: int, dtype: torch.dtype, weight: WeightShape, nvfp4: bool = False, coded: bool = False
) -> tuple[Plan, KernelSpec]:
    """The launch for a legal problem of one launch, and its kernel."""
    chosen = plan(m, weight, nvfp4)
    rest = (nvfp4, DENSE, coded, weight.symmetric)
    return chosen, kernel_of(chosen.config, weight.bits, dtype, chosen.tokens, *rest)


def kernels_of(m: int, dtype: torch.dtype, weight: WeightShape, nvfp4: bool = False) -> list[KernelSpec]:
    """The kernels that `linear` launches on a legal weight by m tokens of 16 bits, any number."""
    most = TOKENS[-1]
    return [planned(part, dtype, weight, nvfp4)[1] for part in {min(m, most), m % most} - {0}]


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
    row_scale: torch.Tensor | None = None,
    x_scales: torch.Tensor | None = None,
) -> None:
    """Launch the kernel on a legal problem, 16 tokens at a time; arguments as in `products.linear_tiled`.

    Tiles of NVFP4 are told from others by their size. row_scale, float32 [M], multiplies rows of the result.
    x_scales: x is NVFP4, as `Prepared.launch` takes it, by NVFP4 tiles. At most CODED_TOKENS tokens,
    in_features a multiple of GROUP_COLUMNS.
    """
    most = TOKENS[-1]
    if x.shape[0] > most:
        rest = (tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
        for first in range(0, x.shape[0], most):
            part = slice(first, first + most)
            linear(x[part], *rest, out[part], None if row_scale is None else row_scale[part])
        return
    index, coded = x.device.index, x_scales is not None
    weight = WeightShape.of(codebook, index, out_features, in_features, silu_and_mul)
    one = prepared(index, x.shape[0], out.dtype, weight, nvfp4_layout.is_nvfp4(tiled), coded)
    x = x if coded else operands.aligned_rows(x)
    one.launch(x, tiled, codebook, scale, bias, out, row_scale, x_scales)
