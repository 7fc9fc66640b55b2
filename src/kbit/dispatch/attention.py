"""Implementation of `kbit::attention_step`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import attention_schemas


@implement(attention_schemas.NAME)
def _attention_step(
    query,
    key,
    value,
    gate,
    query_norm,
    key_norm,
    cos,
    sin,
    mask,
    keys,
    values,
    length,
    scaling,
    eps=0.0,
    plus_one=False,
    round_first=True,
):
    given = query, key, value, gate, query_norm, key_norm, cos, sin, mask, keys, values, length
    settings = scaling, eps, plus_one, round_first
    out = attention_schemas.attention_step(*given, *settings)
    if out.numel():
        module = module_on_gpus(attention_schemas.NAME, query.device)
        module.attention_step(*given, *settings, out)
    increment_version((keys, values))
    return out
