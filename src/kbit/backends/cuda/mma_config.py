"""The configurations of csrc/mma.cu: what is compiled, and the shared memory that it takes."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format import layout

WARPS = 8  # of a block
WARP_TILES = 2  # row tiles of a warp
# Tokens of a block, and warps that have the same rows. Of 25 that were measured on an H200, with 2 or 4 row
# tiles a warp and 8 or 16 warps, these are 1% slower than the best for each of 54 problems, and at most 8%.
_SHAPES = ((32, 2), (32, 4), (64, 2), (128, 1), (128, 2))
_EXPERTS_SHAPES = ((128, 1),)  # with fewer tokens grouped.cu is faster
_ANY_EXPERTS_SHAPES = ((64, 2),)  # of codebooks for which 128 tokens spill
_SMALL_SHAPES = ((32, 1), (64, 1))  # where blocks have little shared memory
_FEWEST_STAGES, _MOST_STAGES = 2, 4


class Config(NamedTuple):
    """Compile-time choices of mma.cu.

    Attributes:
        tokens: of a block.
        slices: warps that have the same rows and take column tiles in turn.
        stages: steps in flight.
    """

    tokens: int
    slices: int
    stages: int

    @property
    def row_warps(self) -> int:
        """Warps of a block that have rows of their own, `WARP_TILES` row tiles each."""
        return WARPS // self.slices

    @property
    def rows(self) -> int:
        """Rows of W of a block."""
        return layout.TILE_ROWS * WARP_TILES * self.row_warps

    def shared_bytes(self, bits: int) -> int:
        """Dynamic shared memory of a block."""
        return operands.TABLE_BYTES + self.stages * _stage_bytes(self.tokens, self.slices, bits)

    def spec(
        self, bits: int, dtype: torch.dtype, symmetric: bool = True, experts: bool = False
    ) -> KernelSpec:
        """mma.cu; `symmetric`: for codebooks that are, `experts`: for rows sorted by expert."""
        choices = {"stages": self.stages, "experts": experts, **operands.codebook_config(bits, symmetric)}
        return KernelSpec.make("mma.cu", bits=bits, **self._shared_choices(dtype), **choices)

    def sums_spec(self, dtype: torch.dtype) -> KernelSpec:
        """mma_sums.cu, which adds up what its blocks leave where they split K."""
        return KernelSpec.make("mma_sums.cu", **self._shared_choices(dtype))

    def _shared_choices(self, dtype: torch.dtype) -> dict[str, int | bool]:
        bf16 = dtype == torch.bfloat16
        return {"bf16": bf16, "tokens": self.tokens, "slices": self.slices, "warps": WARPS}


def _stage_bytes(tokens: int, slices: int, bits: int) -> int:
    """Activations and weights of a step, as the header of mma.cu lays them out."""
    return 2 * layout.TILE_COLUMNS * tokens * slices + 4 * layout.tile_words(bits) * WARP_TILES * WARPS


@functools.cache
def configs(bits: int, symmetric: bool, shared_bytes: int, experts: bool = False) -> tuple[Config, ...]:
    """The configurations for blocks that may have `shared_bytes` of shared memory."""
    shapes: tuple[tuple[int, int], ...] = _EXPERTS_SHAPES if experts else _SHAPES
    if shared_bytes <= operands.SMALL_MEMORY:
        shapes = _SMALL_SHAPES
    elif not symmetric and (bits, False) in operands.CODES:
        shapes = _ANY_EXPERTS_SHAPES if experts else tuple(shape for shape in shapes if shape[0] < 128)
    found = []
    for tokens, slices in shapes:
        fitting = (shared_bytes - operands.TABLE_BYTES) // _stage_bytes(tokens, slices, bits)
        if fitting >= _FEWEST_STAGES:
            found.append(Config(tokens, slices, min(fitting, _MOST_STAGES)))
    return tuple(found)


def specs(shared_bytes: int, arch: str) -> list[KernelSpec]:
    """Every kernel that is ever launched on such an architecture; on Hopper only if forced, so none."""
    if arch == driver.HOPPER:
        return []
    found: dict[KernelSpec, None] = {}
    for bits, symmetric in operands.CODES:
        for experts in (False, True):
            for config in configs(bits, symmetric, shared_bytes, experts):
                for dtype in operands.DTYPES:
                    found[config.spec(bits, dtype, symmetric, experts)] = None
                    if not experts:
                        found[config.sums_spec(dtype)] = None
    return list(found)


def sums_bytes(config: Config, blocks: int) -> int:
    """Memory for the float32 sums that so many blocks leave to mma_sums.cu."""
    return blocks * config.row_warps * driver.WARP * 2 * WARP_TILES * config.tokens
