"""Implementation of `kbit::gated_delta_step`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from kbit.backends import reference
from kbit.dispatch.backends import backend_for
from kbit.dispatch.ops import implement
from kbit.ops import gated_delta_schemas


@implement("gated_delta_step")
def _gated_delta_step(projected, gates, window, state, taps, log_decay, bias, norm, eps):
    given = projected, gates, window, state, taps, log_decay, bias, norm
    gated_delta_schemas.check(*given)
    out = gated_delta_schemas.output(projected, state)
    # There is no CPU kernel: PyTorch's operators serve there, whichever backend multiplies.
    on_gpu = projected.is_cuda
    module = backend_for("gated_delta_step", projected.device, torch.uint8).module if on_gpu else reference
    module.gated_delta_step(*given, eps, out)
    increment_version((window, state))
    return out
