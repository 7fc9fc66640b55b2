"""Sums and rows of all ranks by GPUs that write into each other's memory, csrc/one_shot.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec

RANKS = range(2, 9)  # GPUs of one machine
LINE_BYTES, PIECE_BYTES = 8, 16  # of x, and what it takes on its way
STATE = (1, 0)  # at first
_INBOXES = "Q" * 8 + "Qiii"  # with the state, the rank, the capacity and seconds
_FORMAT, _NORM_FORMAT = f"QQ{_INBOXES}ii", f"{'Q' * 6}{_INBOXES}ifii"
_THREADS = 128
# Of rows that `rms_norm` sums by two pieces a thread, too, and a block of 512 can.
_NORM_COLUMNS = range(64 * operands.PIECE + 1, 1024 * operands.PIECE + 1)
# As long as torch.distributed waits by default.
_SECONDS = 600


def inbox_bytes(ranks: int, capacity: int) -> int:
    """Bytes of a rank's inbox for tensors of so many lines, at most."""
    return 2 * ranks * capacity * PIECE_BYTES


@functools.cache
def _spec(dtype: torch.dtype, ranks: int, gathers: bool) -> KernelSpec:
    # Gathering moves bits, of either dtype.
    bf16 = dtype == torch.bfloat16 and not gathers
    return KernelSpec.make("one_shot.cu", bf16=bf16, gathers=gathers, ranks=ranks)


@functools.cache
def _norm_spec(dtype: torch.dtype, ranks: int) -> KernelSpec:
    return KernelSpec.make("one_shot_norm.cu", bf16=dtype == torch.bfloat16, ranks=ranks)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    kinds = [*((dtype, False) for dtype in operands.DTYPES), (operands.DTYPES[0], True)]
    alone = [_spec(dtype, ranks, gathers) for dtype, gathers in kinds for ranks in RANKS]
    return alone + [_norm_spec(dtype, ranks) for dtype in operands.DTYPES for ranks in RANKS]


def load(dtype: torch.dtype, ranks: int, index: int) -> None:
    """Have all kernels for a dtype and so many ranks on a device.

    Raises:
        KbitError: one cannot be compiled or loaded.
    """
    for gathers in (False, True):
        launcher.load(_spec(dtype, ranks, gathers), index, _FORMAT)
    launcher.load(_norm_spec(dtype, ranks), index, _NORM_FORMAT)


class Inboxes(NamedTuple):
    """Memory of all ranks that is mapped here, as `kbit.ops.one_shot_schemas` has it."""

    addresses: Sequence[int]
    state: torch.Tensor
    rank: int
    capacity: int

    def arguments(self) -> tuple[int, ...]:
        """Those of every kernel."""
        rest = (0,) * (RANKS[-1] - len(self.addresses))
        return *self.addresses, *rest, self.state.data_ptr(), self.rank, self.capacity, _SECONDS


def one_shot(x: torch.Tensor, inboxes: Inboxes, out: torch.Tensor, gathers: bool) -> None:
    """`kbit::one_shot_sum` into `out`, which may be x, or `kbit::one_shot_gather`.

    Args:
        x: float16 or bfloat16, contiguous, a multiple of 8 bytes from a multiple of 8 on; gathered, its rows.
        inboxes: of the ranks.
        out: like x; gathered, with as many times more columns as there are ranks.
        gathers: which of the two.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    index = x.device.index
    kernel = launcher.load(_spec(x.dtype, len(inboxes.addresses), gathers), index, _FORMAT)
    lines, row_lines = (size * x.element_size() // LINE_BYTES for size in (x.numel(), x.shape[-1]))
    prepared = launcher.Prepared(index, kernel, (-(-lines // _THREADS), 1, 1), _THREADS)
    prepared.launch((*operands.addresses(x, out), *inboxes.arguments(), lines, row_lines))


def takes_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes a part [..., D], what its sum is added to, and the weight [D] of a norm."""
    for tensor in (x, residual, weight):
        if not tensor.is_contiguous() or tensor.data_ptr() % 16 or tensor.dtype != x.dtype:
            return False
    return x.shape[-1] in _NORM_COLUMNS and not x.shape[-1] % operands.PIECE


def one_shot_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    inboxes: Inboxes,
    how: tuple[float, bool, bool],
    outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """`kbit::one_shot_add_rms_norm` of what `takes_norm` takes.

    Args:
        x, residual: [..., D] of 16 bits.
        weight: [D].
        inboxes: of the ranks.
        how: eps, plus_one and round_first.
        outs: the sum, the total and its norm, contiguous, like x.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    index, pieces = x.device.index, x.shape[-1] // operands.PIECE
    kernel = launcher.load(_norm_spec(x.dtype, len(inboxes.addresses)), index, _NORM_FORMAT)
    lanes = -(-pieces // (2 * driver.WARP)) * driver.WARP
    prepared = launcher.Prepared(index, kernel, (x.numel() // x.shape[-1], 1, 1), lanes)
    places = operands.addresses(x, residual, weight, *outs)
    prepared.launch((*places, *inboxes.arguments(), pieces, *how))
