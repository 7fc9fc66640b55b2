"""A sum over ranks by GPUs that write into each other's memory, as one op, and all ranks' columns as another.

    y = torch.ops.kbit.one_shot_sum(x, inboxes, state, rank, capacity, seconds)
    y = torch.ops.kbit.one_shot_gather(x, inboxes, state, rank, capacity, seconds)

x, of 16 bits, is summed over the ranks of one machine, added in float32 in the order of ranks and rounded
once: the same bits on all. Or [..., C] of each becomes [..., ranks * C].

Every rank calls them with x of the same size, in the same order, on one stream. `inboxes` are addresses of
memory on the ranks' GPUs, all mapped here, of 2 x ranks x capacity pieces of 16 bytes, a piece for 8 bytes of
x; `state` is int32 [3] on this GPU. At first inboxes are zeros and state is (1, 0, 0). A rank that does not
come for so many seconds ends this process's work on its GPU.
`kbit.integrations.transformers.collectives` makes them.
"""

from __future__ import annotations

import torch

from kbit.ops import checks
from kbit.ops.schemas import LIBRARY, TAGS

MOST_RANKS = 8
LINE_BYTES = 8

_X = "Tensor x, int[] inboxes, Tensor(a!) state, int rank, int capacity, int seconds"

LIBRARY.define(f"one_shot_sum({_X}) -> Tensor", tags=TAGS)
LIBRARY.define(f"one_shot_gather({_X}) -> Tensor", tags=TAGS)


def check(
    op: str,
    x: torch.Tensor,
    inboxes: list[int],
    state: torch.Tensor,
    rank: int,
    capacity: int,
    seconds: int,
) -> None:
    """Check the arguments of an op of these.

    Raises:
        TypeError: x is not of 16 bits, or the state not int32 [3] beside it.
        ValueError: x does not fit into an inbox, or not into whole pieces, rank is none of the inboxes', or
            seconds are not positive.
    """
    if x.dtype not in checks.HALF_DTYPES:
        raise TypeError(f"{op}: x must be float16 or bfloat16, got {x.dtype}. Cast it.")
    if state.dtype != torch.int32 or state.shape != (3,) or state.device != x.device:
        raise TypeError(
            f"{op}: state must be int32 [3] on {x.device} like x, got {state.dtype} {tuple(state.shape)} on "
            f"{state.device}."
        )
    if not 2 <= len(inboxes) <= MOST_RANKS or not 0 <= rank < len(inboxes):
        raise ValueError(
            f"{op}: there must be 2 to {MOST_RANKS} inboxes, and one of this rank, got {len(inboxes)} and "
            f"rank {rank}."
        )
    if seconds < 1:
        raise ValueError(f"{op}: seconds must be at least 1, got {seconds}.")
    if x.dim() == 0:
        raise ValueError(f"{op}: x must have a dimension or more, got a scalar.")
    whole = x.shape[-1] if op == "one_shot_gather" else x.numel()
    size, most = x.numel() * x.element_size(), LINE_BYTES * capacity
    if whole * x.element_size() % LINE_BYTES or size > most:
        raise ValueError(
            f"{op}: x, or a row of it to be gathered, must be a multiple of {LINE_BYTES} bytes, and x {most} "
            f"bytes at most, got {tuple(x.shape)}, {size} bytes. Leave it to the process group."
        )


@torch.library.register_fake("kbit::one_shot_sum", lib=LIBRARY)
def one_shot_sum(x, inboxes, state, rank, capacity, seconds):  # noqa: D103
    check("one_shot_sum", x, inboxes, state, rank, capacity, seconds)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("kbit::one_shot_gather", lib=LIBRARY)
def one_shot_gather(x, inboxes, state, rank, capacity, seconds):  # noqa: D103
    check("one_shot_gather", x, inboxes, state, rank, capacity, seconds)
    return x.new_empty((*x.shape[:-1], len(inboxes) * x.shape[-1]))
