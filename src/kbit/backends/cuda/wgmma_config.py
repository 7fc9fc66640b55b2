"""The configurations of csrc/wgmma.cu: what is compiled, and the shared memory that it takes."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import layout, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format.codebook import SUPPORTED_BITS

TOKENS = (16, 32, 64, 96, 128, 176, 192, 256)  # a block's, at compile time
GROUPED_TOKENS = (16, 32, 64, 128, 256)
TILE_COLUMNS, ROW_TILES = 64, 8
_SHARED_BYTES = 227 * 1024
_MOST_STAGES = 12
# Up to so many tokens a step is two tiles: the latencies of decoding are more than the products take.
_FEW_TOKENS = 64
# Where the sums of a cluster have a place of their own, which saves it a barrier.
_SUMS_BYTES = {16: 16 * 1024, 32: 24 * 1024, 64: 36 * 1024}
_UNIT_BYTES = 2048  # sums of 32 rows by 16 tokens
_STAGING_BYTES = 512  # of y: two buffers of each warpgroup with 128 bytes a token
_BARRIER_BYTES = 16
_SCRATCH_BYTES, _LIST_BYTES = 256, 16 * operands.MOST_EXPERTS


def columns(tokens: int) -> int:
    """Of a step."""
    return 2 * TILE_COLUMNS if tokens <= _FEW_TOKENS else TILE_COLUMNS


def steps_of(in_features: int, tokens: int) -> int:
    """Of a tile; a cluster's blocks share them."""
    return -(-in_features // columns(tokens))


def _round(bits: int, tokens: int) -> int:
    """Tokens of y that are staged at once; at 5 bits fewer make room for a fourth step of 256 tokens."""
    return 16 if tokens == 16 or (bits == 5 and tokens == 256) else 32


def _fixed_bytes(bits: int, tokens: int, grouped: bool) -> int:
    fixed = operands.TABLE_BYTES + _SUMS_BYTES.get(tokens, 0)
    fixed += _round(bits, tokens) * _STAGING_BYTES
    if grouped:  # the list lies in unused parts of the table of 3 and 4 bits
        fixed += _SCRATCH_BYTES + (0 if bits in (3, 4) else _LIST_BYTES)
    return fixed


def _stage_bytes(bits: int, tokens: int, nvfp4: bool) -> int:
    tiles = columns(tokens) // TILE_COLUMNS
    weights = ROW_TILES * 4 * layout.words_of(bits, nvfp4)
    return tiles * (tokens * TILE_COLUMNS * 2 + weights) + _BARRIER_BYTES


def stages(bits: int, tokens: int, grouped: bool, nvfp4: bool = False) -> int:
    """Steps in flight: as many as fit."""
    room = _SHARED_BYTES - _fixed_bytes(bits, tokens, grouped)
    return min(_MOST_STAGES, room // _stage_bytes(bits, tokens, nvfp4))


@functools.cache
def shared_bytes(bits: int, tokens: int, grouped: bool, nvfp4: bool = False) -> int:
    """Shared memory of a block, which the constants of wgmma.cuh are checked against."""
    ring = stages(bits, tokens, grouped, nvfp4) * _stage_bytes(bits, tokens, nvfp4)
    return _fixed_bytes(bits, tokens, grouped) + ring


@functools.cache
def spec(
    bits: int, dtype: torch.dtype, tokens: int, grouped: bool = False, nvfp4: bool = False
) -> KernelSpec:
    """The kernel of one configuration; `nvfp4`: for NVFP4's tiles."""
    return KernelSpec.make(
        "wgmma.cu",
        bits=bits,
        bf16=dtype == torch.bfloat16,
        tokens=tokens,
        columns=columns(tokens),
        stages=stages(bits, tokens, grouped, nvfp4),
        round=_round(bits, tokens),
        sums=_SUMS_BYTES.get(tokens, 0),
        experts=operands.MOST_EXPERTS if grouped else 0,
        shared_bytes=shared_bytes(bits, tokens, grouped, nvfp4),
        table_bytes=operands.TABLE_BYTES,
        **layout.nvfp4_config(nvfp4),
    )


def specs() -> list[KernelSpec]:
    """Every kernel that plans of kbit.backends.cuda.wgmma may choose."""
    k_bit = [
        spec(bits, dtype, tokens, grouped)
        for bits in SUPPORTED_BITS
        for dtype in operands.DTYPES
        for grouped in (False, True)
        for tokens in (GROUPED_TOKENS if grouped else TOKENS)
    ]
    nvfp4 = [
        spec(layout.NVFP4_BITS, dtype, tokens, nvfp4=True) for dtype in operands.DTYPES for tokens in TOKENS
    ]
    return k_bit + nvfp4


def sums_fit(tokens: int, bits: int, cluster: int, grouped: bool) -> bool:
    """Whether the sums that a block of a cluster is sent have room."""
    units = -(-(tokens // 4) // cluster)
    activations = stages(bits, tokens, grouped) * tokens * columns(tokens) * 2
    return cluster * units * _UNIT_BYTES <= _SUMS_BYTES.get(tokens, activations)
