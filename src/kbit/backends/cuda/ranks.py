"""Sums and rows of all ranks by GPUs that write into each other's memory, csrc/one_shot.cu."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kbit.backends.cuda import launcher, operands
from kbit.backends.cuda.compiler import KernelSpec

RANKS = range(2, 9)  # GPUs of one machine
LINE_BYTES, PIECE_BYTES = 8, 16  # of x, and what it takes on its way
STATE = (1, 0)  # at first
_FORMAT = "QQ" + "Q" * 8 + "Qiii" + "ii"
_THREADS = 128
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


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    kinds = [*((dtype, False) for dtype in operands.DTYPES), (operands.DTYPES[0], True)]
    return [_spec(dtype, ranks, gathers) for dtype, gathers in kinds for ranks in RANKS]


def load(dtype: torch.dtype, ranks: int, index: int) -> None:
    """Have all kernels for a dtype and so many ranks on a device.

    Raises:
        KbitError: one cannot be compiled or loaded.
    """
    for gathers in (False, True):
        launcher.load(_spec(dtype, ranks, gathers), index, _FORMAT)


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
