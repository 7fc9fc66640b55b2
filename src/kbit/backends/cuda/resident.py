"""Few experts whose weights the machine holds at once, csrc/resident.cu: which problems it takes, its launch.

As with `grouped`, `plan` knows how many rows there are, not how they are dealt to experts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, operands, sorted_rows, stream_config
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import layout

# It lives on kernels that begin before those in front of them are done.
ARCH = stream_config.MEASURED_ARCH
TOKENS = sorted_rows.TOKENS
_WARPS, _TILES = 8, 4  # of a block, and column tiles of a warp at most
_FORMAT = sorted_rows.FORMAT + "i" * 6
_SUM_BYTES = 128  # of a warp's sums of a token


@dataclass(frozen=True)
class Config:
    """Compile-time choices of resident.cu.

    Attributes:
        blocks: blocks that run at once on a multiprocessor.
        in_holes: whether activations lie in what the look-up table of 3 to 5 bits leaves free.
        warps: warps of a block.
        tiles: column tiles of a warp, at most.
    """

    blocks: int
    in_holes: bool
    warps: int = _WARPS
    tiles: int = _TILES

    def spec(self, bits: int, dtype: torch.dtype, tokens: int, symmetric: bool = True) -> KernelSpec:
        """The kernel for this configuration; `symmetric`: for codebooks that are, around 0."""
        return KernelSpec.make(
            "resident.cu",
            bits=bits,
            bf16=dtype == torch.bfloat16,
            tokens=tokens,
            warps=self.warps,
            blocks=self.blocks,
            tiles=self.tiles,
            in_holes=self.in_holes,
            **operands.codebook_config(bits, symmetric),
        )


@dataclass(frozen=True)
class Plan:
    """A launch. Places in shared memory are byte offsets, as the header of resident.cu lays it out.

    Attributes:
        config: the kernel's compile-time choices.
        tokens: tokens of one expert at a time that the kernel is compiled for.
        grid: blocks.
        each, rest: units (two row tiles) of a block, and how many blocks have one more.
        span: warps that split K.
        x_at: where the activations of some rows are.
        weights_at, weight_bytes: where the weights of the block are, and how many bytes.
        parts_at: where the sums of warps that split K are.
        shared_bytes: dynamic shared memory of a block.
    """

    config: Config
    tokens: int
    grid: int
    each: int
    rest: int
    span: int
    x_at: int
    weights_at: int
    weight_bytes: int
    parts_at: int
    shared_bytes: int

    @property
    def own(self) -> tuple[int, ...]:
        """The kernel's own arguments."""
        places = (self.x_at, self.weights_at, self.parts_at)
        return (self.each, self.rest, self.span.bit_length() - 1, *places)


def configs(bits: int) -> list[Config]:
    """The configurations for a code width, the best first; `plan` takes one that fits in shared memory."""
    alone = Config(1, False)
    # Two blocks, so that the next kernel may begin beside this one.
    return [Config(2, True), alone] if bits in operands.HOLES else [alone]


def specs(shared_bytes: int) -> list[KernelSpec]:
    """Every kernel that `plan` may choose on a GPU whose blocks may have `shared_bytes` of shared memory."""
    return sorted_rows.specs(lambda bits, *_: configs(bits), shared_bytes)


def refusal(dtype: torch.dtype, experts: int, weight: WeightShape) -> str | None:
    """Why the kernel may not take a problem, or None."""
    if weight.device.arch != ARCH:
        return f"it is for sm_{ARCH}, this is sm_{weight.device.arch}"
    most = _WARPS * _TILES * layout.TILE_COLUMNS
    if weight.in_features > most:
        return f"it takes up to {most} columns, got {weight.in_features}"
    reason = operands.grouped_refusal(dtype, weight.out_features, weight.gated, experts)
    if reason is None and plan(1, experts, weight) is None:  # as for any number
        reason = f"{experts} experts' weights do not fit in the multiprocessors' shared memory"
    return reason


@functools.lru_cache(maxsize=4096)
def plan(rows: int, experts: int, weight: WeightShape) -> Plan | None:
    """The launch for so many rows, dealt to experts in any way; None if shared memory is too small."""
    out_features, in_features, bits, _, device, _ = weight
    row_tiles, k_tiles, words = layout.tile_shape(out_features, in_features, bits)
    # All multiprocessors, also if there is less to do: else some have two blocks of the next such launch.
    grid = device.multiprocessors
    each, rest = divmod(-(-row_tiles // 2) * experts, grid)
    most = each + (rest > 0)
    several = rows > TOKENS[0] * experts
    for tokens, config in itertools.product(TOKENS[several::-1], configs(bits)):
        span = _span(most, k_tiles, config)
        if k_tiles > span * config.tiles:
            continue
        weights_at = operands.TABLE_BYTES + -(-config.warps * 8 // 128) * 128
        weight_bytes = most * 2 * k_tiles * words * 4
        places = _places(config, tokens, k_tiles, weights_at + weight_bytes)
        if places is not None and places[-1] <= driver.room(device.shared_bytes, config.blocks):
            x_at, parts_at, end = places
            return Plan(config, tokens, grid, each, rest, span, x_at, weights_at, weight_bytes, parts_at, end)
    return None


def _places(config: Config, tokens: int, k_tiles: int, weights_end: int) -> tuple[int, int, int] | None:
    """Where activations and sums are, and the end of it all; None if the holes are too small."""
    x_bytes, part_bytes = k_tiles * layout.TILE_COLUMNS * 2 * tokens, config.warps * tokens * _SUM_BYTES
    if not config.in_holes:
        x_at = sorted_rows.row_aligned(weights_end)
        return x_at, x_at + x_bytes, x_at + x_bytes + part_bytes
    if tokens == TOKENS[0]:
        fit, parts_at, end = x_bytes, weights_end, weights_end + part_bytes
    else:  # sums, too, for which no other room is left
        fit, parts_at, end = x_bytes + part_bytes, 2 * x_bytes + operands.HOLE, weights_end
    return (0, parts_at, end) if fit <= operands.HOLE_BYTES else None


def _span(most: int, k_tiles: int, config: Config) -> int:
    """Warps that split K, each with a tile at least: so few that all have a unit, if tiles allow that."""
    span = config.warps
    while span > k_tiles or (config.warps // span < most and k_tiles <= span // 2 * config.tiles):
        span //= 2
    return span


# Launches the kernel on a legal problem; see `kbit.backends.cuda.products.grouped_linear_tiled`.
linear = functools.partial(sorted_rows.linear, plan, _FORMAT)
