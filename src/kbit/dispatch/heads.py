"""Implementation of `kbit::append_heads`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import heads_schemas


@implement("append_heads")
def _append_heads(
    query,
    key,
    value,
    query_norm,
    key_norm,
    cos,
    sin,
    keys,
    values,
    length,
    eps=0.0,
    plus_one=False,
    round_first=True,
):
    given = query, key, value, query_norm, key_norm, cos, sin, keys, values, length
    settings = eps, plus_one, round_first
    out = heads_schemas.append_heads(*given, *settings)
    if query.numel() or key.numel():
        module = module_on_gpus("append_heads", query.device)
        module.append_heads(*given, *settings, out.transpose(1, 2))
    increment_version((keys, values))
    return out
