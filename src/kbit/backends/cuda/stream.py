"""The small-batch kernel, csrc/stream.cu: which configuration takes a problem, and its launch.

Legality is `refusal`; `plan` chooses among what is legal. The choice follows measurements on an H200 (132
multiprocessors) and changes speed alone: results depend on N, K and whether there are 1, 2 to 4, 5 to 8 or
more tokens.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, layout, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.stream_config import (
    DENSE,
    TOKENS,
    Config,
    configs,
    kernel_of,
    sums_of,
)
from kbit.format.codebook import bits_of

_FORMAT = "QQQQQQiiiiiiiiQQQiiii"
_GROUP_TILES = 4  # column tiles that a worker takes at a time
GROUP_COLUMNS = layout.TILE_COLUMNS * _GROUP_TILES
_WARP = 32
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
        shared_bytes: dynamic shared memory of a block.
    """

    config: Config
    tokens: int
    grid: int
    workers: int
    ring_at: int
    parts_at: int
    totals_at: int
    shared_bytes: int


def refusal(m: int, dtype: torch.dtype, out_features: int, silu_and_mul: bool) -> str | None:
    """Why the kernel may not take a problem, or None."""
    if not 1 <= m <= TOKENS[-1]:
        return f"it takes 1 to {TOKENS[-1]} tokens, got {m}"
    return operands.refusal(dtype, out_features, silu_and_mul)


@functools.lru_cache(maxsize=4096)
def plan(
    m: int,
    out_features: int,
    in_features: int,
    bits: int,
    gated: bool,
    device: driver.DeviceLimits,
    nvfp4: bool = False,
    experts: int = DENSE,
) -> Plan:
    """The launch for a legal problem."""
    tokens = next(t for t in TOKENS if t >= m)
    row_tiles, column_tiles, _ = layout.tile_shape(out_features, in_features, bits)
    groups = -(-column_tiles // _GROUP_TILES)
    units = row_tiles // 2 if gated else row_tiles
    wanted = _by_groups(m, groups) if bits == 5 else _by_shape(m, groups, units / device.multiprocessors)
    config = _nearest(configs(bits, tokens, device.shared_bytes, device.arch, experts), wanted)
    passes = -(-groups // min(wanted.workers, config.workers))
    # All passes are of one size, and the table wants several warps to fill it.
    workers = max(-(-groups // passes), min(8, config.workers))
    tile_bytes = 4 * layout.words_of(bits, nvfp4)
    lay_out = functools.partial(_lay_out, config, tokens, workers, units, passes, bits, gated, tile_bytes)
    grid = min(units, device.multiprocessors * wanted.blocks)
    if wanted.blocks * lay_out(grid).shared_bytes > device.shared_bytes:
        grid = min(units, device.multiprocessors)
    # Fewer row tiles a block have fewer totals to keep.
    while lay_out(grid).shared_bytes > device.shared_bytes and grid < units:
        grid = min(units, 2 * grid)
    return lay_out(grid)


@dataclass(frozen=True)
class _Wanted:
    """What would be fastest.

    Attributes:
        workers: warps that split K, at most.
        stages: groups of tiles that a worker has in flight.
        blocks: blocks at once on a multiprocessor.
        compiled_for: most workers of the kernel to use; fewer leave each more registers.
    """

    workers: int
    stages: int
    blocks: int = 1
    compiled_for: int = 16


def _by_shape(m: int, groups: int, share: float) -> _Wanted:
    """What was fastest for 14 shapes (k = 4) on an H200; `share` is row tiles per multiprocessor.

    Two blocks, or one beside the next kernel's, need 96 registers or fewer. One stage where there are few
    row tiles: weights that are fetched early come before the activations, which are waited for.
    """
    if m == 1:
        if groups <= 8:
            return _Wanted(8, 2, blocks=2 if share > 2 else 1)
        if groups <= 16 and 1 < share <= 2:
            return _Wanted(8, 1, blocks=2, compiled_for=20)
        if 16 < groups <= 20:
            return _Wanted(20, 1, compiled_for=20)
        return _Wanted(8, 2, blocks=2) if 20 < groups <= 64 and share > 1 else _Wanted(16, 2)
    if m <= 4:
        if groups <= 8:
            return _Wanted(8, 1, blocks=2) if share > 2 else _Wanted(8, 2)
        if groups <= 16 and 0.5 < share <= 1:
            return _Wanted(8, 2)
        if groups > 20 and share > 8:
            return _Wanted(8, 2, blocks=2)
        return _Wanted(16, 2 if groups > 64 or (groups > 20 and share <= 1) else 1)
    if m <= 8:
        if groups <= 8:
            return _Wanted(8, 2, compiled_for=12 if share > 2 else 16)
        if groups <= 16 and 0.5 < share <= 2:
            return _Wanted(8, 2, compiled_for=12)
        if 20 < groups <= 40 and share > 1:
            return _Wanted(12, 2, compiled_for=12)
        return _Wanted(16, 2 if groups > 8 and share <= 0.5 else 1)
    return _by_groups(m, groups)


def _by_groups(m: int, groups: int) -> _Wanted:
    """What to use where look-up tables are large, or nothing has been measured."""
    # Between 17 and 24 groups, three passes of a narrow block keep fewer activations in flight.
    narrow = groups <= 8 or (m > 1 and 16 < groups <= 24)
    return _Wanted(8, 2, compiled_for=8) if narrow else _Wanted(16, 2)


def _nearest(available: list[Config], wanted: _Wanted) -> Config:
    def distance(config: Config) -> tuple[bool, int, int]:
        neither = config.workers not in (wanted.compiled_for, wanted.workers)
        return neither, abs(config.stages - wanted.stages), abs(config.workers - wanted.compiled_for)

    return min(available, key=distance)


def _lay_out(
    config: Config,
    tokens: int,
    workers: int,
    units: int,
    passes: int,
    bits: int,
    gated: bool,
    tile_bytes: int,
    grid: int,
) -> Plan:
    """Shared memory: table, barriers, ring, parts, totals; as the header of stream.cu says."""
    sums, rows = sums_of(tokens), -(-units // grid)
    ring_at = config.table_bytes + _BARRIER_BYTES
    parts_at = ring_at + workers * config.stages * _GROUP_TILES * tile_bytes
    parts = 0 if config.in_holes(bits, tokens) else config.buffers(tokens) * workers * sums * _ROW_BYTES
    totals_at = parts_at + parts
    kept = (2 if gated else 1) * rows * sums * _ROW_BYTES if gated or (passes > 1 and rows > 1) else 0
    return Plan(config, tokens, grid, workers, ring_at, parts_at, totals_at, totals_at + kept)


class Routing(NamedTuple):
    """A token's experts for the kernel, as `Routing` in stream.cuh: addresses, numbers and widths."""

    ids: int = 0
    weights: int = 0
    slots: int = 0
    experts: int = 0
    wide_ids: int = 0
    wide_weights: int = 0


NO_ROUTING = Routing()


def launch(
    chosen: Plan,
    spec: KernelSpec,
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, int, int, bool],
    out: torch.Tensor,
    row_scale: torch.Tensor | None = None,
    routing: Routing = NO_ROUTING,
) -> None:
    """Launch a kernel as planned. `sizes`: N, K, tokens, and whether it is gated."""
    x = operands.aligned_rows(x)
    out_features, in_features, m, gated = sizes
    launcher.launch_on(
        x.device.index,
        launcher.load(spec, x.device.index, _FORMAT),
        (chosen.grid, 1, 1),
        (chosen.workers + 1) * _WARP,
        (
            tiled.data_ptr(),
            codebook.data_ptr(),
            scale.data_ptr(),
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_features,
            in_features,
            m,
            x.shape[1],  # contiguous; the stride of a single row may be anything
            int(gated),
            chosen.ring_at,
            chosen.parts_at,
            chosen.totals_at,
            0 if row_scale is None else row_scale.data_ptr(),
            *routing,
        ),
        smem=chosen.shared_bytes,
        pdl=True,
    )


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
) -> None:
    """Launch the kernel on a legal problem, 16 tokens at a time; arguments as in `products.linear_tiled`.

    Tiles of NVFP4 are told from others by their size. row_scale, float32 [M], multiplies rows of the result.
    """
    most = TOKENS[-1]
    if x.shape[0] > most:
        weight = (tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
        for first in range(0, x.shape[0], most):
            part = slice(first, first + most)
            linear(x[part], *weight, out[part], None if row_scale is None else row_scale[part])
        return
    bits, nvfp4 = bits_of(codebook), layout.is_nvfp4(tiled)
    limits = driver.device_limits(x.device.index)
    chosen = plan(x.shape[0], out_features, in_features, bits, silu_and_mul, limits, nvfp4)
    spec = kernel_of(chosen.config, bits, x.dtype, chosen.tokens, nvfp4)
    sizes = (out_features, in_features, x.shape[0], silu_and_mul)
    launch(chosen, spec, x, tiled, codebook, scale, bias, sizes, out, row_scale)
