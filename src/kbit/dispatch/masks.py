"""Implementation of `kbit::causal_mask`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import mask_schemas


@implement("causal_mask")
def _causal_mask(first, there, batch, tokens, keys, dtype):
    out = mask_schemas.causal_mask(first, there, batch, tokens, keys, dtype)
    if out.numel():
        there = None if there is None else there.contiguous()
        module_on_gpus("causal_mask", first.device).causal_mask(first, there, out[:, 0])
    return out
