"""Experts with few tokens each, csrc/grouped.cu: which configuration takes a problem, and its launch.

`plan` knows how many rows there are, not how they are dealt to experts: that is read on the device. Its
choice changes speed and the order of sums.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from kbit.backends.cuda import driver, operands, sorted_rows
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import layout

TOKENS = sorted_rows.TOKENS
_FORMAT = sorted_rows.FORMAT + "i" * 8
_STAGE_TILES = 4
_SCRATCH_BYTES = 256
_JOB_BYTES = 20
_ROW_BYTES = 128  # of 32 sums
# Tiles per multiprocessor; more need the warps of the larger blocks: 10 experts of 1024 x 2048 (155 tiles)
# take 9.2 us with them and 10.6 without, 8 of 2048 x 512 (62) take 5.5 and 5.0.
_FEW_TILES = 96
# Pieces of experts in a block's list, at most about; for more pieces there are several blocks a
# multiprocessor.
_MOST_JOBS = 64
_ANY_ROWS = 2**24  # from here on, more rows take no more shared memory


@dataclass(frozen=True)
class Config:
    """Compile-time choices of grouped.cu.

    Attributes:
        warps: warps of a block.
        blocks: blocks that run at once on a multiprocessor.
        stages: groups of four tiles that a warp has in flight.
        in_holes: whether activations lie in what the look-up table of 3 bits and more leaves free.
    """

    warps: int
    blocks: int
    stages: int
    in_holes: bool = False

    def spec(self, bits: int, dtype: torch.dtype, tokens: int, symmetric: bool = True) -> KernelSpec:
        """The kernel for this configuration; `symmetric`: for codebooks that are, around 0."""
        return KernelSpec.make(
            "grouped.cu",
            bits=bits,
            bf16=dtype == torch.bfloat16,
            tokens=tokens,
            warps=self.warps,
            blocks=self.blocks,
            stages=self.stages,
            in_holes=self.in_holes,
            experts=operands.MOST_EXPERTS,
            **operands.codebook_config(bits, symmetric),
        )


@dataclass(frozen=True)
class Plan:
    """A launch. Places in shared memory are byte offsets, as the header of grouped.cu lays it out.

    Attributes:
        config: the kernel's compile-time choices.
        tokens: tokens of one expert at a time that the kernel is compiled for.
        most: how many of these are taken at a time; fewer where shared memory is short.
        grid: blocks.
        span: warps that split K.
        x_at, x_room: where activations are, and bytes for them: 0 if one expert's do not fit.
        x_slots: rows of activations that fit there.
        ring_at: where tiles in flight are.
        jobs_at: where the block's list of pieces of experts is.
        parts_at: where the sums of warps that split K are.
        shared_bytes: dynamic shared memory of a block.
    """

    config: Config
    tokens: int
    most: int
    grid: int
    span: int
    x_at: int
    x_room: int
    x_slots: int
    ring_at: int
    jobs_at: int
    parts_at: int
    shared_bytes: int

    @property
    def own(self) -> tuple[int, ...]:
        """The kernel's own arguments."""
        places = (self.x_at, self.x_slots, self.ring_at, self.jobs_at, self.parts_at)
        return (self.most.bit_length() - 1, self.span, *places)


def configs(bits: int, tokens: int, shared_bytes: int) -> list[Config]:
    """The configurations for a GPU whose blocks may have `shared_bytes` of shared memory, the best first."""
    if shared_bytes <= operands.SMALL_MEMORY:
        return [Config(8, 1, 1, in_holes=bits in operands.HOLES)]
    if shared_bytes <= operands.ONE_TABLE_MEMORY:  # too little for two blocks; fewer warps leave more of it
        return [Config(16, 1, 2), Config(8, 1, 2)]
    # Two blocks, so that the next kernel may begin beside this one; one where activations need the room, or
    # more warps have it, which hide more of each other's look-ups. (For 16 tokens registers are too few.)
    many = [Config(24, 1, 2)] if bits <= 3 and tokens == TOKENS[0] else []
    return [Config(8, 2, 2, in_holes=bits in operands.HOLES), *many, Config(16, 1, 2)]


def specs(shared_bytes: int) -> list[KernelSpec]:
    """Every kernel that `plan` may choose on a GPU whose blocks may have `shared_bytes` of shared memory."""
    return sorted_rows.specs(configs, shared_bytes)


def refusal(dtype: torch.dtype, experts: int, weight: WeightShape) -> str | None:
    """Why the kernel may not take a problem, or None."""
    reason = operands.grouped_refusal(dtype, weight.out_features, weight.gated, experts)
    if reason is None and plan(_ANY_ROWS, experts, weight) is None:
        room = weight.device.shared_bytes
        reason = f"a row of {weight.in_features} activations does not fit in {room} bytes"
    return reason


@functools.lru_cache(maxsize=4096)
def plan(rows: int, experts: int, weight: WeightShape) -> Plan | None:
    """The launch for so many rows, dealt to experts in any way; None if shared memory is too small.

    Where it is enough for some number of rows, it is for any smaller one.
    """
    most = TOKENS[1] if rows > TOKENS[0] * experts else TOKENS[0]
    while most:
        preferred = _preferred(rows, experts, max(most, TOKENS[0]), weight)
        for fewer in (1, 2, 4, 8, 16):  # warps that split K, whose sums need room
            for config in preferred:
                chosen = _lay_out(config, rows, experts, most, fewer, weight)
                if chosen.x_room:
                    return chosen
        most //= 2
    return None


def _active(rows: int, experts: int) -> float:
    """Expected number of experts that get any of so many rows, dealt at random."""
    return experts * (1 - (1 - 1 / experts) ** rows)


def _preferred(rows: int, experts: int, tokens: int, weight: WeightShape) -> list[Config]:
    """Configurations, the fastest first."""
    out_features, in_features, bits, _, device, _ = weight
    available = configs(bits, tokens, device.shared_bytes)
    row_tiles, k_tiles, _ = layout.tile_shape(out_features, in_features, bits)
    row_tiles_each = _active(rows, experts) * row_tiles / device.multiprocessors
    if row_tiles_each * k_tiles <= _FEW_TILES:
        return available
    most, *fewer = sorted(available, key=lambda config: -config.warps)
    alone = _span(rows, experts, -(-row_tiles // 2), k_tiles, device.multiprocessors, most.warps) == 1
    if fewer and alone and most.warps < row_tiles_each / 2 <= 2 * fewer[0].warps:
        # Two turns with either: 51 experts of 2048 x 512 took 13.2 us by 24 warps, 12.1 by 16.
        return [fewer[0], most, *fewer[1:]]
    return [most, *fewer]


def _lay_out(config: Config, rows: int, experts: int, most: int, fewer: int, weight: WeightShape) -> Plan:
    """The launch of a configuration, K split by `fewer` times fewer warps than would be fastest.

    Its `x_room` is 0 where not even one expert's activations fit.
    """
    out_features, in_features, bits, _, device, _ = weight
    row_tiles, k_tiles, words = layout.tile_shape(out_features, in_features, bits)
    units = -(-row_tiles // 2)
    pieces = min(rows, rows // most + experts)
    # Also if there is less to do: 8 experts of 512 x 2048, a row each, took 6.3 us with 128 blocks, not 5.3.
    grid = device.multiprocessors * max(1, -(-pieces // (device.multiprocessors * _MOST_JOBS)))
    span = max(1, _span(rows, experts, units, k_tiles, grid, config.warps) // fewer)
    jobs = -(-pieces // grid) + 1
    ring_at = operands.TABLE_BYTES + config.warps * config.stages * 8 + _SCRATCH_BYTES
    jobs_at = ring_at + config.warps * config.stages * _STAGE_TILES * 4 * words
    tokens = max(most, TOKENS[0])
    parts_at = -(-(jobs_at + _JOB_BYTES * (jobs + 1)) // 16) * 16
    end = parts_at + config.warps // span * (span - 1) * tokens * _ROW_BYTES
    room = driver.room(device.shared_bytes, config.blocks)
    if config.in_holes:
        x_at, x_room = 0, operands.HOLE_BYTES if end <= room else 0
    else:
        x_at = end = sorted_rows.row_aligned(end)
        x_room = max(0, room - end)
    row_bytes = k_tiles * layout.TILE_COLUMNS * 2
    x_room = min(x_room, jobs * most * row_bytes) if x_room >= most * row_bytes else 0
    end += 0 if config.in_holes else x_room
    x_slots = x_room // row_bytes
    return Plan(config, tokens, most, grid, span, x_at, x_room, x_slots, ring_at, jobs_at, parts_at, end)


def _span(rows: int, experts: int, units: int, k_tiles: int, grid: int, warps: int) -> int:
    """Warps that split K: as few as keep a block's warps busy, if rows are dealt at random.

    They divide `warps`: a team with fewer than its span would wait for the others without an end.

    With more units than warps it is the last turn that leaves some idle, and a team's are shorter: of 512
    experts of 1024 x 2048, 80 rows on an H200 took 26.5 us by teams of 2, 26.9 by teams of 4, 29.4 by single
    warps, 1280 rows 141, 145 and 144; of 2048 x 512, whose turns are short as it is, 80 rows took 16.8 by
    teams of 2, 15.9 by single warps.
    """
    each = _active(rows, experts) * units / grid
    if each > warps:  # several turns of all warps
        return 2 if k_tiles >= 16 else 1
    span = 1
    while warps % (2 * span) == 0 and each * 2 * span <= warps and k_tiles >= 4 * span:
        span *= 2
    return span


def linear(*problem: Any, settled: bool = False) -> None:
    """Launch the kernel on a legal problem.

    Args:
        problem: as `sorted_rows.linear` takes it.
        settled: see `kbit.backends.cuda.products.grouped_linear_tiled`.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    sorted_rows.linear(plan, _FORMAT, *problem, int(settled))
