"""RMS norm, csrc/rms_norm.cu: which rows it takes, and its launch."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import norm as reference

_FORMAT = "QQQQQQiifii"
# Pieces that a thread keeps, and up to how many of a row it is so many.
_PIECES = {1: 64, 2: 2048}
_FEW_LANES = 16  # of short rows
# Threads of a block of rows that take less, and of many such.
_THREADS, _MANY_THREADS, _MANY = 128, 512, 4096


@functools.cache
def _spec(dtype: torch.dtype, pieces: int) -> KernelSpec:
    return KernelSpec.make("rms_norm.cu", bf16=dtype == torch.bfloat16, pieces=pieces)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_spec(dtype, pieces) for dtype in operands.DTYPES for pieces in _PIECES]


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes rows [..., D] of 16 bits by a weight [D] of the same dtype, as they are."""
    columns = x.shape[-1]
    if (
        x.dtype not in operands.DTYPES
        or columns % operands.PIECE
        or not 0 < columns <= operands.PIECE * max(_PIECES.values())
    ):
        return False
    contiguous = x.is_contiguous() and weight.is_contiguous()
    return contiguous and not (x.data_ptr() | weight.data_ptr()) % 16


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
        x: [..., D], float16, bfloat16 or float32, one element or more.
        weight: [D] of x's dtype.
        eps, plus_one, round_first: as in `kbit.ops.norm_schemas`.
        out: like x, contiguous.
        added: like x; x + added, written to `total`, like x and contiguous, takes the place of x.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    if not (takes(x, weight) and (added is None or takes(added, weight))):
        reference.rms_norm(x, weight, eps, plus_one, round_first, out, added, total)
        return
    index, columns = x.device.index, x.shape[-1]
    prepared, sizes = _prepared(index, x.dtype, x.numel() // columns, columns)
    places = operands.addresses(x, added, weight, total, out)
    prepared.launch((*places, *sizes, eps, plus_one, round_first))


@functools.lru_cache(maxsize=4096)
def _prepared(
    index: int, dtype: torch.dtype, rows: int, columns: int
) -> tuple[launcher.Prepared, tuple[int, int, int]]:
    """The launch, and the arguments rows, pieces and lanes of a row."""
    pieces = columns // operands.PIECE
    each = next(count for count, most in _PIECES.items() if pieces <= most)
    lanes = _FEW_LANES if pieces <= _FEW_LANES else -(-pieces // (each * driver.WARP)) * driver.WARP
    threads = lanes if lanes > driver.WARP else _THREADS if rows < _MANY else _MANY_THREADS
    kernel = launcher.load(_spec(dtype, each), index, _FORMAT)
    grid = (-(-rows * lanes // threads), 1, 1)
    return launcher.Prepared(index, kernel, grid, threads), (rows, pieces, lanes)
