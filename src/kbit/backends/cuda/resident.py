"""Few experts whose weights the machine holds at once, csrc/resident.cu: which problems it takes, its launch.

As with `grouped`, `plan` knows how many rows there are, not how they are dealt to experts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import layout
from kbit.format.codebook import SUPPORTED_BITS, bits_of

ARCH = "90a"  # it was measured there, and lives on kernels that begin before those in front of them are done
TOKENS = (8, 16)  # most tokens of one expert that a compiled kernel takes at a time
_WARPS, _TILES = 8, 4  # of a block, and column tiles of a warp at most
_FORMAT = "QQQQQQQ" + "i" * 13
_PART_BYTES = 1024  # of the sums of a warp
_RESERVED_BYTES = 1024


@dataclass(frozen=True)
class Config:
    """Compile-time choices of resident.cu.

    Attributes:
        blocks: blocks that run at once on a multiprocessor.
        in_holes: whether activations lie in what the look-up table of 3 and 4 bits leaves free.
        table_bytes: size of the look-up table, see decode.cuh.
        warps: warps of a block.
        tiles: column tiles of a warp, at most.
    """

    blocks: int
    in_holes: bool
    table_bytes: int
    warps: int = _WARPS
    tiles: int = _TILES

    def spec(self, bits: int, dtype: torch.dtype, tokens: int) -> KernelSpec:
        """The kernel for this configuration."""
        return KernelSpec.make(
            "resident.cu",
            bits=bits,
            bf16=dtype == torch.bfloat16,
            tokens=tokens,
            warps=self.warps,
            blocks=self.blocks,
            tiles=self.tiles,
            in_holes=self.in_holes,
            table_bytes=self.table_bytes,
        )


# Cached, because every launch looks its kernel up.
_kernel_of = functools.lru_cache(maxsize=4096)(Config.spec)


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


def configs(bits: int, shared_bytes: int) -> list[Config]:
    """The configurations for a GPU whose blocks may have `shared_bytes` of shared memory, the best first."""
    table_bytes = operands.table_bytes(bits, shared_bytes)
    alone = Config(1, False, table_bytes)
    # Two blocks, so that the next kernel may begin beside this one.
    return [Config(2, True, table_bytes), alone] if bits in operands.HOLES else [alone]


def specs(shared_bytes: int) -> list[KernelSpec]:
    """Every kernel that `plan` may choose on a GPU whose blocks may have `shared_bytes` of shared memory."""
    return [
        config.spec(bits, dtype, tokens)
        for bits in SUPPORTED_BITS
        for tokens in TOKENS
        for config in configs(bits, shared_bytes)
        for dtype in operands.DTYPES
    ]


def refusal(rows: int, dtype: torch.dtype, experts: int, weight: WeightShape) -> str | None:
    """Why the kernel may not take a problem, or None."""
    if weight.device.arch != ARCH:
        return f"it is for sm_{ARCH}, this is sm_{weight.device.arch}"
    most = _WARPS * _TILES * layout.TILE_COLUMNS
    if weight.in_features > most:
        return f"it takes up to {most} columns, got {weight.in_features}"
    reason = operands.grouped_refusal(dtype, weight.out_features, weight.gated, experts)
    if reason is None and plan(rows, experts, weight) is None:
        reason = f"{experts} experts' weights do not fit in the multiprocessors' shared memory"
    return reason


@functools.lru_cache(maxsize=4096)
def plan(rows: int, experts: int, weight: WeightShape) -> Plan | None:
    """The launch for so many rows, dealt to experts in any way; None if shared memory is too small."""
    out_features, in_features, bits, _, device = weight
    row_tiles, k_tiles, words = layout.tile_shape(out_features, in_features, bits)
    # All multiprocessors, also if there is less to do: else some have two blocks of the next such launch.
    grid = device.multiprocessors
    each, rest = divmod(-(-row_tiles // 2) * experts, grid)
    most = each + (rest > 0)
    several = rows > TOKENS[0] * experts
    for tokens, config in itertools.product(TOKENS[several::-1], configs(bits, device.shared_bytes)):
        x_bytes = k_tiles * layout.TILE_COLUMNS * 2 * tokens
        span = _span(most, k_tiles, config)
        if k_tiles > span * config.tiles or (config.in_holes and x_bytes > operands.HOLE_BYTES):
            continue
        weights_at = config.table_bytes + -(-config.warps * 8 // 128) * 128
        weight_bytes = most * 2 * k_tiles * words * 4
        x_at = weights_at + weight_bytes
        parts_at = x_at + (0 if config.in_holes else x_bytes)
        end = parts_at + config.warps * _PART_BYTES
        # Of a multiprocessor's, each block takes 1 KB for itself.
        if end <= (device.shared_bytes + _RESERVED_BYTES) // config.blocks - _RESERVED_BYTES:
            x_at = 0 if config.in_holes else x_at
            places = (x_at, weights_at, weight_bytes, parts_at)
            return Plan(config, tokens, grid, each, rest, span, *places, end)
    return None


def _span(most: int, k_tiles: int, config: Config) -> int:
    """Warps that split K, each with a tile at least: so few that all have a unit, if tiles allow that."""
    span = config.warps
    while span > k_tiles or (config.warps // span < most and k_tiles <= span // 2 * config.tiles):
        span //= 2
    return span


def linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    source: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """Launch the kernel on a legal problem; see `kbit.backends.cuda.products.grouped_linear_tiled`."""
    index, rows = x.device.index, out.shape[0]
    bits, experts = bits_of(codebook), tiled.shape[0]
    limits = driver.device_limits(index)
    chosen = plan(rows, experts, WeightShape(out_features, in_features, bits, silu_and_mul, limits))
    assert chosen is not None
    x = operands.aligned_rows(x)
    x_rows, x_stride = x.shape  # contiguous; the stride of a single row may be anything
    kernel = launcher.load(_kernel_of(chosen.config, bits, x.dtype, chosen.tokens), index, _FORMAT)
    launcher.launch_on(
        index,
        kernel,
        (chosen.grid, 1, 1),
        chosen.config.warps * driver.WARP,
        (
            *operands.addresses(tiled, codebook, scale, x, out, offsets, source),
            *(out_features, in_features, rows, x_stride, x_rows, experts, int(silu_and_mul)),
            *(chosen.each, chosen.rest, chosen.span.bit_length() - 1),
            *(chosen.x_at, chosen.weights_at, chosen.parts_at),
        ),
        smem=chosen.shared_bytes,
        pdl=True,
    )
