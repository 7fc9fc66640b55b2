"""A router's logits, csrc/moe_logits.cu and csrc/moe_logits_mma.cu: which kernel makes them, and its launch.

Tensors are contiguous, on one CUDA device, and checked by the op layer. Work goes to the current stream of
that device and nothing waits; which kernel, and how it is launched, follow from shapes and dtypes alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import moe as reference

_FORMAT = "QQQQiii"
_SOURCE = "moe_logits.cu"
# Pieces of a row that a thread of moe_logits.cu or norm_logits.cu has in flight, and most threads of a block.
KEPT, BLOCK_THREADS = 2, 512
# Experts of a block of moe_logits.cu, from how many logits on.
_EACH = {1: 1, 1601: 4}
# Tokens and experts of a block where those of a token each would read so many bytes of weights.
_SHARED, _SHARED_BYTES = (4, 4), 14 * 2**20
# Of kernels of logits: x's dtype, whether logits are float32, and whether the weight is.
KINDS = [
    (dtype, *kind) for dtype in operands.DTYPES for kind in ((False, False), (True, False), (True, True))
]
# Logits up to which moe_logits.cu is faster than moe_logits_mma.cu; tokens and logits up to which this is
# faster than cuBLAS; and products with a weight in float32 up to which moe_logits.cu is.
_FEW, _MOST_TOKENS, _MOST_LOGITS, _MOST_WIDE = 2048, 256, 64 * 520, 56 * 2**20
# Experts and tokens of a block of moe_logits_mma.cu, its warps, and chunks of one in flight, three pieces of
# a thread.
_MMA_EXPERTS, _MMA_TOKENS, _MMA_WARPS, _MMA_AT_ONCE = 16, 8, 8, 8
_MMA_BYTES = _MMA_WARPS * driver.WARP * _MMA_AT_ONCE * 3 * 16


@functools.cache
def few_spec(source: str, kind: tuple[torch.dtype, bool, bool], tokens: int, experts: int) -> KernelSpec:
    """moe_logits.cu, or norm_logits.cu: x of a 16-bit dtype, logits and weight in float32 or not."""
    dtype, wide, wide_weight = kind
    kinds = {"bf16": dtype == torch.bfloat16, "wide": wide, "wide_weight": wide_weight}
    block = {"pieces": KEPT, "threads": BLOCK_THREADS, "experts": experts}
    if source == _SOURCE:  # norm_logits.cu has one
        block["tokens"] = tokens
    return KernelSpec.make(source, **kinds, **block)


@functools.cache
def mma_spec(dtype: torch.dtype, wide: bool) -> KernelSpec:
    """The kernel for more tokens, by a weight of their dtype."""
    rest = {"wide_weight": False, "warps": _MMA_WARPS, "at_once": _MMA_AT_ONCE}
    return KernelSpec.make("moe_logits_mma.cu", bf16=dtype == torch.bfloat16, wide=wide, **rest)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    blocks = (*((1, each) for each in _EACH.values()), _SHARED)
    mma = [mma_spec(dtype, wide) for dtype in operands.DTYPES for wide in (False, True)]
    return [*(few_spec(_SOURCE, kind, *block) for kind in KINDS for block in blocks), *mma]


@dataclass(frozen=True)
class Launch:
    """A kernel of a logits' source, its blocks, and threads of each."""

    spec: KernelSpec
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0


def each_of(table: dict[int, int], logits: int) -> int:
    """Experts of a block, of a table by the least number of logits."""
    return next(each for least, each in reversed(table.items()) if logits >= least)


@functools.lru_cache(maxsize=4096)
def few_block(tokens: int, experts: int, columns: int, wide_weight: bool) -> tuple[int, int] | None:
    """Tokens and experts of a block of moe_logits.cu, or None: so many are for moe_logits_mma.cu or cuBLAS.

    Args:
        tokens, experts, columns: how many, of experts with the row of a shared one's gate.
        wide_weight: whether the weight is float32.
    """
    logits = tokens * experts
    products = logits * columns
    many = products > _MOST_WIDE if wide_weight else logits > _FEW
    if not logits or many or tokens > driver.MAX_GRID_Y:
        return None
    if tokens >= _SHARED[0] and products * (4 if wide_weight else 2) >= _SHARED_BYTES:
        return _SHARED
    return 1, each_of(_EACH, logits)


def few_launch(
    source: str, kind: tuple[torch.dtype, bool, bool], sizes: tuple[int, int, int], block: tuple[int, int]
) -> Launch:
    """How moe_logits.cu or norm_logits.cu is launched.

    Args:
        source: which.
        kind: dtype of x; whether logits are float32; whether the weight is.
        sizes: tokens, experts, pieces of 16 bytes of a row of x.
        block: tokens and experts of a block.
    """
    tokens, experts, pieces = sizes
    threads = min(BLOCK_THREADS, -(-pieces // (KEPT * driver.WARP)) * driver.WARP)
    grid = (-(-experts // block[1]), -(-tokens // block[0]), 1)
    return Launch(few_spec(source, kind, *block), grid, threads)


@functools.lru_cache(maxsize=4096)
def launch_of(kind: tuple[torch.dtype, bool, bool], tokens: int, experts: int, columns: int) -> Launch | None:
    """Which kernel makes logits, and how; None: cuBLAS."""
    dtype, wide, wide_weight = kind
    block = few_block(tokens, experts, columns, wide_weight)
    if block is not None:
        return few_launch(_SOURCE, kind, (tokens, experts, columns // operands.PIECE), block)
    if wide_weight or not 1 <= tokens <= _MOST_TOKENS or not 1 <= tokens * experts <= _MOST_LOGITS:
        return None
    grid = (-(-experts // _MMA_EXPERTS), -(-tokens // _MMA_TOKENS), 1)
    return Launch(mma_spec(dtype, wide), grid, _MMA_WARPS * driver.WARP, _MMA_BYTES)


def moe_logits(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, last: torch.Tensor | None = None
) -> torch.Tensor:
    """x @ weight^T of a router; see `kbit.ops.moe_schemas`.

    Args:
        x: [T, K], float32, float16 or bfloat16.
        weight: [E, K] of x's dtype, or float32.
        dtype: of the result, x's or float32; float32 if the weight is.
        last: None, or one more row [1, K] of the weight.

    Returns:
        [T, E], or [T, E + 1] with `last`.
    """
    (tokens, columns), experts = x.shape, weight.shape[0] + (last is not None)
    given = operands.addresses(x, weight, last)
    whole = columns % operands.PIECE == 0 and not any(place % 16 for place in given)
    launch = None
    if x.dtype in operands.DTYPES and columns and whole:
        launch = launch_of(
            (x.dtype, dtype == torch.float32, weight.dtype != x.dtype), tokens, experts, columns
        )
    if launch is None:
        return reference.moe_logits(x, weight, dtype, last)
    logits, index = x.new_empty((tokens, experts), dtype=dtype), x.device.index
    kernel = launcher.load(launch.spec, index, _FORMAT)
    args = (*given, *operands.addresses(logits), experts, columns // operands.PIECE, tokens)
    smem = launch.shared_bytes
    launcher.launch_on(index, kernel, launch.grid, launch.threads, args, smem=smem, pdl=True)
    return logits
