"""Implementations of the ops of `kbit.ops.one_shot_schemas`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch

from kbit.backends import cuda
from kbit.backends.cuda.ranks import Inboxes, takes_norm
from kbit.dispatch.backends import cuda_answers
from kbit.dispatch.ops import contiguous, implement
from kbit.ops import norm_schemas, one_shot_schemas


@implement("one_shot_sum")
def _one_shot_sum(x, *inboxes):
    return _run("one_shot_sum", x, inboxes)


@implement("one_shot_gather")
def _one_shot_gather(x, *inboxes):
    return _run("one_shot_gather", x, inboxes)


@implement("one_shot_add_rms_norm")
def _one_shot_add_rms_norm(x, a, b, c, d, residual, weight, eps, plus_one=False, round_first=True):
    x, inboxes = _checked("one_shot_add_rms_norm", x, (a, b, c, d))
    norm_schemas.check_sum(residual, x, weight, eps)
    residual, weight = contiguous(residual, weight)
    if not takes_norm(x, residual, weight) or not x.numel():
        total = _run("one_shot_sum", x, inboxes)
        return total, *torch.ops.kbit.add_rms_norm(residual, total, weight, eps, plus_one, round_first)
    outs = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    cuda.one_shot_norm(x, residual, weight, Inboxes(*inboxes), (eps, plus_one, round_first), outs)
    return outs


def _checked(op, x, inboxes):
    one_shot_schemas.check(op, x, *inboxes)
    if not cuda_answers(x):
        raise ValueError(f"{op}: ranks must be GPUs that kbit has kernels for, got {x.device}.")
    x = x.contiguous()
    return x.clone() if x.data_ptr() % one_shot_schemas.LINE_BYTES else x, inboxes


def _run(op, x, inboxes):
    x, inboxes = _checked(op, x, inboxes)
    gathers = op == "one_shot_gather"
    out = x.new_empty((*x.shape[:-1], x.shape[-1] * (len(inboxes[0]) if gathers else 1)))
    if out.numel():
        cuda.one_shot(x, Inboxes(*inboxes), out, gathers)
    return out
