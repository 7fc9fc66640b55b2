"""Implementation of `kbit::rotary`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch

from kbit.backends import reference
from kbit.dispatch.backends import backend_for
from kbit.dispatch.ops import implement
from kbit.ops import rotary_schemas


@implement("rotary")
def _rotary(query, key, cos, sin):
    rotary_schemas.check(query, key, cos, sin)
    outputs = rotary_schemas.outputs(query, key)
    if query.numel() or key.numel():
        # There is no CPU kernel: PyTorch's operators serve there, whichever backend multiplies.
        module = backend_for("rotary", query.device, torch.uint8).module if query.is_cuda else reference
        module.rotary(query, key, cos, sin, *(out.transpose(1, 2) for out in outputs))
    return outputs
