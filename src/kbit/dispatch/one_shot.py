"""Implementations of `kbit::one_shot_sum` and `kbit::one_shot_gather`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from kbit.backends import cuda
from kbit.dispatch.backends import cuda_answers
from kbit.dispatch.ops import implement
from kbit.ops import one_shot_schemas


@implement("one_shot_sum")
def _one_shot_sum(x, inboxes, state, rank, capacity):
    return _run("one_shot_sum", x, inboxes, state, rank, capacity)


@implement("one_shot_gather")
def _one_shot_gather(x, inboxes, state, rank, capacity):
    return _run("one_shot_gather", x, inboxes, state, rank, capacity)


def _run(op, x, inboxes, state, rank, capacity):
    one_shot_schemas.check(op, x, inboxes, state, rank, capacity)
    if not cuda_answers(x):
        raise ValueError(f"{op}: ranks must be GPUs that kbit has kernels for, got {x.device}.")
    x = x.contiguous()
    if x.data_ptr() % one_shot_schemas.LINE_BYTES:
        x = x.clone()
    gathers = op == "one_shot_gather"
    out = x.new_empty((*x.shape[:-1], x.shape[-1] * (len(inboxes) if gathers else 1)))
    if out.numel():
        cuda.one_shot(x, inboxes, state, rank, capacity, out, gathers)
    return out
