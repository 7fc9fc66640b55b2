"""Implementations of the ops of gated delta attention, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import gated_delta_schemas


@implement("gated_delta_step")
def _gated_delta_step(projected, gates, window, state, taps, log_decay, bias, norm, eps, by_heads=True):
    given = projected, gates, window, state, taps, log_decay, bias, norm, eps, by_heads
    out = gated_delta_schemas.gated_delta_step(*given)
    module_on_gpus("gated_delta_step", projected.device).gated_delta_step(*given, out)
    increment_version((window, state))
    return out


@implement("gated_delta_inputs")
def _gated_delta_inputs(projected, gates, window, taps, log_decay, bias, count=None, by_heads=True):
    given = projected, gates, window, taps, log_decay, bias, count
    heads = gated_delta_schemas.check_inputs(*given)
    out = gated_delta_schemas.inputs(projected, taps, heads)
    if out[0].numel():
        module = module_on_gpus("gated_delta_inputs", projected.device)
        module.gated_delta_inputs(*given, by_heads, heads, out)
    return out


@implement("gated_delta_rule")
def _gated_delta_rule(query, key, value, beta, decay, before=None):
    given = query, key, value, beta, decay, before
    heads = gated_delta_schemas.check_rule(*given)
    out = gated_delta_schemas.behind(value)
    if out[0].numel():
        tensors = [tensor if tensor is None else tensor.contiguous() for tensor in given]
        module_on_gpus("gated_delta_rule", query.device).gated_delta_rule(*tensors, heads, out)
    elif before is not None:
        out[1].copy_(before)
    else:
        out[1].zero_()
    return out


@implement("gated_delta_output")
def _gated_delta_output(x, projected, norm, eps, by_heads=True):
    heads = gated_delta_schemas.check_output(x, projected, norm)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if out.numel():
        module = module_on_gpus("gated_delta_output", x.device)
        module.gated_delta_output(x, projected, norm, eps, by_heads, heads, out)
    return out
