"""RMS norm, csrc/rms_norm.cu: which rows it takes, and its launch."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import norm as reference

_FORMAT = "QQQQQQQQiiifii"
# Pieces that a thread keeps, and up to how many of a row it is so many.
PIECES = {1: 64, 2: 2048}
_FEW_LANES = 16  # of short rows
# Threads of a block of rows that take less, and of many such.
_THREADS, _MANY_THREADS, _MANY = 128, 512, 4096
# Rows of a thread, and threads of a block, where short rows have so many lanes in all. On an H100, 2048
# tokens' 32 heads of 128 take 16 us, by one row 41; their 4 heads 4.7 and 7.2; 8192 tokens' 32 heads 54 and
# 282, by four rows 75.
_ROWS, _ROWS_THREADS, _MANY_LANES = 8, 128, 2**17
_MOST_STRIDED = 2**31  # rows, which are divided in 32 bits


class _Rows(NamedTuple):
    """Where rows lie: row r is outer * (r // inner) + step * (r % inner) elements behind the first."""

    number: int
    inner: int
    outer: int
    step: int


@functools.cache
def _spec(dtype: torch.dtype, pieces: int, rows: int) -> KernelSpec:
    return KernelSpec.make("rms_norm.cu", bf16=dtype == torch.bfloat16, pieces=pieces, rows=rows)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    kinds = [*((pieces, 1) for pieces in PIECES), (1, _ROWS)]
    return [_spec(dtype, *kind) for dtype in operands.DTYPES for kind in kinds]


@functools.lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> _Rows | None:
    """Of a tensor [..., D] that is not empty; None where two strides do not say it."""
    dims: list[tuple[int, int]] = []  # counts and strides, the fastest first, neighbours joined
    for count, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if count > 1 and dims and stride == dims[-1][0] * dims[-1][1]:
            dims[-1] = dims[-1][0] * count, dims[-1][1]
        elif count > 1:
            dims.append((count, stride))
    if strides[-1] != 1 or len(dims) > 2 or any(stride % operands.PIECE for _, stride in dims):
        return None
    rows = math.prod(shape[:-1])
    if len(dims) < 2:
        return _Rows(rows, 1, dims[0][1] if dims else shape[-1], 0)
    (inner, step), (_, outer) = dims
    return _Rows(rows, inner, outer, step) if rows < _MOST_STRIDED else None


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes rows [..., D] of 16 bits by a weight [D] of the same dtype, as they are."""
    return _taken(x, weight) is not None


def _taken(x: torch.Tensor, weight: torch.Tensor) -> _Rows | None:
    """Where the rows lie that the kernel takes; None if it does not."""
    columns = x.shape[-1]
    fits = not columns % operands.PIECE and 0 < columns <= operands.PIECE * max(PIECES.values())
    if x.dtype not in operands.DTYPES or not fits or not weight.is_contiguous():
        return None
    return None if (x.data_ptr() | weight.data_ptr()) % 16 else _rows(x.shape, x.stride())


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    round_first: bool,
    out: torch.Tensor,
    added: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> None:
    """`kbit::rms_norm` into `out`, or `kbit::add_rms_norm`; the reference where the kernel may not.

    Args:
        x: [..., D], float16, bfloat16 or float32, one element or more, any strides; those of heads, such as
            a projection's part for queries, are read in their places.
        weight: [D] of x's dtype.
        eps, plus_one, round_first: as in `kbit.ops.norm_schemas`.
        out: like x, contiguous.
        added: like x; x + added, written to `total`, like x and contiguous, takes the place of x.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    rows = _taken(x, weight)
    if rows is None:
        x = x.contiguous()  # which may be all that it takes
        rows = _taken(x, weight)
    if rows is None or not (added is None or _is_plain(added)):
        reference.rms_norm(x, weight, eps, plus_one, round_first, out, added, total)
        return
    prepared, sizes = _prepared(x.device.index, x.dtype, rows, x.shape[-1], added is not None)
    places = operands.addresses(x, added, weight, total, out)
    prepared.launch((*places, *sizes, eps, plus_one, round_first))


def _is_plain(added: torch.Tensor) -> bool:
    return added.is_contiguous() and not added.data_ptr() % 16


@functools.lru_cache(maxsize=4096)
def _prepared(
    index: int, dtype: torch.dtype, rows: _Rows, columns: int, of_sums: bool
) -> tuple[launcher.Prepared, tuple[int, ...]]:
    """The launch, and the arguments from strides to lanes of a row."""
    pieces = columns // operands.PIECE
    each = next(count for count, most in PIECES.items() if pieces <= most)
    lanes = _FEW_LANES if pieces <= _FEW_LANES else -(-pieces // (each * driver.WARP)) * driver.WARP
    short = lanes <= driver.WARP
    at_once = _ROWS if short and not of_sums and rows.number * lanes >= _MANY_LANES else 1
    threads = lanes if not short else _THREADS if rows.number < _MANY else _MANY_THREADS
    threads = _ROWS_THREADS if at_once > 1 else threads
    kernel = launcher.load(_spec(dtype, each, at_once), index, _FORMAT)
    grid = (-(-rows.number * lanes // (threads * at_once)), 1, 1)
    strides = (stride // operands.PIECE for stride in (rows.outer, rows.step))
    return launcher.Prepared(index, kernel, grid, threads), (*strides, rows.number, rows.inner, pieces, lanes)
