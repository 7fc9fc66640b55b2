"""The configurations of csrc/wgmma.cu: what is compiled, and the shared memory that it takes."""

from __future__ import annotations

import torch

from kbit.backends.cuda import layout, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format.codebook import SUPPORTED_BITS

TOKENS = (16, 32, 64, 96, 128, 176, 256)  # a block's, at compile time
GROUPED_TOKENS = (16, 32, 64, 128, 256)
TILE_COLUMNS, ROW_TILES = 64, 8
_SHARED_BYTES = 227 * 1024
_MOST_STAGES = 12
# Up to so many tokens a step is two tiles: the latencies of decoding are more than the products take.
_FEW_TOKENS = 64
# Where the sums of a cluster have a place of their own, which saves it a barrier.
_SUMS_BYTES = {16: 16 * 1024, 32: 24 * 1024, 64: 36 * 1024}
_UNIT_BYTES = 2048  # sums of 32 rows by 16 tokens
# Of y: two buffers of each warpgroup with 128 bytes a token.
_STAGING_TOKENS, _STAGING_BYTES = 32, 512
_BARRIER_BYTES = 16
_SCRATCH_BYTES, _LIST_BYTES = 256, 16 * (operands.MOST_EXPERTS + 1)


def columns(tokens: int) -> int:
    """Of a step."""
    return 2 * TILE_COLUMNS if tokens <= _FEW_TOKENS else TILE_COLUMNS


def steps_of(in_features: int, tokens: int) -> int:
    """Of a tile; a cluster's blocks share them."""
    return -(-in_features // columns(tokens))


def _fixed_bytes(bits: int, tokens: int, grouped: bool) -> int:
    fixed = operands.table_bytes(bits, pairs=False) + _SUMS_BYTES.get(tokens, 0)
    fixed += min(tokens, _STAGING_TOKENS) * _STAGING_BYTES
    if grouped:  # the list lies in unused parts of the table of 3 and 4 bits
        fixed += _SCRATCH_BYTES + (0 if bits in (3, 4) else _LIST_BYTES)
    return fixed


def _stage_bytes(bits: int, tokens: int) -> int:
    tiles = columns(tokens) // TILE_COLUMNS
    return tiles * (tokens * TILE_COLUMNS * 2 + ROW_TILES * 4 * layout.tile_words(bits)) + _BARRIER_BYTES


def stages(bits: int, tokens: int, grouped: bool) -> int:
    """Steps in flight: as many as fit."""
    room = _SHARED_BYTES - _fixed_bytes(bits, tokens, grouped)
    return min(_MOST_STAGES, room // _stage_bytes(bits, tokens))


def shared_bytes(bits: int, tokens: int, grouped: bool) -> int:
    """Shared memory of a block; as the constants of wgmma.cu add up."""
    return _fixed_bytes(bits, tokens, grouped) + stages(bits, tokens, grouped) * _stage_bytes(bits, tokens)


def spec(bits: int, dtype: torch.dtype, tokens: int, grouped: bool = False) -> KernelSpec:
    """The kernel of one configuration."""
    return KernelSpec.make(
        "wgmma.cu",
        bits=bits,
        bf16=dtype == torch.bfloat16,
        tokens=tokens,
        columns=columns(tokens),
        stages=stages(bits, tokens, grouped),
        sums=_SUMS_BYTES.get(tokens, 0),
        experts=operands.MOST_EXPERTS if grouped else 0,
        table_bytes=operands.table_bytes(bits, pairs=False),
    )


def specs() -> list[KernelSpec]:
    """Every kernel that plans of kbit.backends.cuda.wgmma may choose."""
    return [
        spec(bits, dtype, tokens, grouped)
        for bits in SUPPORTED_BITS
        for dtype in operands.DTYPES
        for grouped in (False, True)
        for tokens in (GROUPED_TOKENS if grouped else TOKENS)
    ]


def sums_fit(tokens: int, bits: int, cluster: int, grouped: bool) -> bool:
    """Whether the sums that a block of a cluster is sent have room."""
    units = -(-(tokens // 4) // cluster)
    activations = stages(bits, tokens, grouped) * tokens * columns(tokens) * 2
    return cluster * units * _UNIT_BYTES <= _SUMS_BYTES.get(tokens, activations)
