"""Implementation of `kbit::gated_delta_step`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import gated_delta_schemas


@implement("gated_delta_step")
def _gated_delta_step(projected, gates, window, state, taps, log_decay, bias, norm, eps):
    given = projected, gates, window, state, taps, log_decay, bias, norm
    gated_delta_schemas.check(*given)
    out = gated_delta_schemas.output(projected, state)
    module_on_gpus("gated_delta_step", projected.device).gated_delta_step(*given, eps, out)
    increment_version((window, state))
    return out
