"""Implementations of the ops of `kbit.ops.one_shot_schemas`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from kbit.backends import cuda
from kbit.backends.cuda.ranks import Inboxes
from kbit.dispatch.backends import cuda_answers
from kbit.dispatch.ops import implement
from kbit.ops import one_shot_schemas


@implement("one_shot_sum")
def _one_shot_sum(x, *inboxes):
    return _run("one_shot_sum", x, inboxes)


@implement("one_shot_gather")
def _one_shot_gather(x, *inboxes):
    return _run("one_shot_gather", x, inboxes)


def _run(op, x, inboxes):
    one_shot_schemas.check(op, x, *inboxes)
    if not cuda_answers(x):
        raise ValueError(f"{op}: ranks must be GPUs that kbit has kernels for, got {x.device}.")
    x = x.contiguous()
    if x.data_ptr() % one_shot_schemas.LINE_BYTES:
        x = x.clone()
    inboxes, gathers = Inboxes(*inboxes), op == "one_shot_gather"
    out = x.new_empty((*x.shape[:-1], x.shape[-1] * (len(inboxes.addresses) if gathers else 1)))
    if out.numel():
        cuda.one_shot(x, inboxes, out, gathers)
    return out
