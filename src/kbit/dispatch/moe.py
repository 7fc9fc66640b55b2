"""Implementations of the routing ops, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import contiguous, implement
from kbit.ops import checks, moe_checks, moe_schemas


@implement("moe_logits")
def _moe_logits(x, weight, dtype=None, last=None):
    moe_checks.moe_logits(x, weight, dtype, last)
    last = None if last is None else last.contiguous()
    run = module_on_gpus("moe_logits", x.device).moe_logits
    return run(x.contiguous(), weight.contiguous(), dtype or x.dtype, last)


@implement("moe_route")
def _moe_route(logits, top_k, scoring, normalize, bias=None, factor=1.0, shared=""):
    choices = moe_schemas.moe_route(logits, top_k, scoring, normalize, bias, factor, shared)
    if choices[0].numel():
        run = module_on_gpus("moe_route", logits.device).moe_route
        bias = None if bias is None else bias.contiguous()
        run(logits.contiguous(), scoring, normalize, bias, factor, shared, *choices)
    return choices


@implement("moe_align")
def align(ids, num_experts):
    """`kbit::moe_align`."""
    routing = moe_schemas.moe_align(ids, num_experts)
    module_on_gpus("moe_align", ids.device).moe_align(ids.contiguous(), *routing)
    return routing


@implement("moe_combine")
def combine(y, inverse, weights, bounds=None):
    """`kbit::moe_combine`."""
    out = y.new_empty(moe_checks.moe_combine(y, inverse, weights, bounds))
    return _run_combine(y, inverse, weights, bounds, out)


@implement("moe_combine.out")
def _combine_out(y, inverse, weights, bounds=None, *, out):
    shape = moe_checks.moe_combine(y, inverse, weights, bounds)
    checks.output("moe_combine", out, shape, y.dtype, y.device)
    _run_combine(y, inverse, weights, bounds, out)


def _run_combine(y, inverse, weights, bounds, out):
    if out.numel():
        run = module_on_gpus("moe_combine", y.device).moe_combine
        run(*contiguous(y, inverse, weights), None if bounds is None else bounds.contiguous(), out)
    return out
