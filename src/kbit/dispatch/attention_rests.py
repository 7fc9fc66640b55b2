"""Implementation of `kbit::attention_rest`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import attention_rest_schemas


@implement(attention_rest_schemas.NAME)
def _attention_rest(query, keys, values, length, scaling):
    out = attention_rest_schemas.attention_rest(query, keys, values, length, scaling)
    if out.numel():
        module = module_on_gpus(attention_rest_schemas.NAME, query.device)
        module.attention_rest(query, keys, values, length, scaling, out)
    return out
