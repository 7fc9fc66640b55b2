"""Sums and rows of all ranks by GPUs that write into each other's memory, csrc/one_shot.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kbit.backends.cuda import elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.ops.one_shot_schemas import LINE_BYTES, MOST_RANKS

RANKS = range(2, MOST_RANKS + 1)  # GPUs of one machine
_PIECE_BYTES = 16  # what a line of x takes on its way
STATE = (1, 0, 0)  # at first; see csrc/one_shot.cu
_FORMAT = "QQ" + "Q" * 8 + "Qiii" + "ii"
# Of kernels: a dtype, and whether they gather.
_KINDS = (*((dtype, False) for dtype in operands.DTYPES), (operands.DTYPES[0], True))


def inbox_bytes(ranks: int, capacity: int) -> int:
    """Bytes of a rank's inbox for tensors of so many lines, at most."""
    return 2 * ranks * capacity * _PIECE_BYTES


@functools.cache
def _spec(dtype: torch.dtype, ranks: int, gathers: bool) -> KernelSpec:
    # Gathering moves bits, of either dtype.
    bf16 = dtype == torch.bfloat16 and not gathers
    return KernelSpec.make("one_shot.cu", bf16=bf16, gathers=gathers, ranks=ranks)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_spec(dtype, ranks, gathers) for dtype, gathers in _KINDS for ranks in RANKS]


def load(ranks: int, index: int) -> None:
    """Have all kernels for so many ranks on a device.

    Raises:
        KbitError: one cannot be compiled or loaded.
    """
    for dtype, gathers in _KINDS:
        launcher.load(_spec(dtype, ranks, gathers), index, _FORMAT)


class Inboxes(NamedTuple):
    """Memory of all ranks that is mapped here, as `kbit.ops.one_shot_schemas` has it.

    Where `seconds` are negative, a rank that does not come sets state[2], and the result is worthless.
    """

    addresses: Sequence[int]
    state: torch.Tensor
    rank: int
    capacity: int
    seconds: int


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
    index, (addresses, state, rank, capacity, seconds) = x.device.index, inboxes
    kernel = launcher.load(_spec(x.dtype, len(addresses), gathers), index, _FORMAT)
    lines, row_lines = (size * x.element_size() // LINE_BYTES for size in (x.numel(), x.shape[-1]))
    places = *operands.addresses(x, out), *addresses, *(0,) * (RANKS[-1] - len(addresses)), state.data_ptr()
    elementwise.launch(index, kernel, lines, (*places, rank, capacity, seconds, lines, row_lines))
