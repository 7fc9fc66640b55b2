"""Implementation of `kbit::cache_append`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import cache_schemas


@implement("cache_append")
def _cache_append(keys, values, key, value, length):
    cache_schemas.check(keys, values, key, value, length)
    if key.numel() + value.numel() and keys.shape[2]:
        module_on_gpus("cache_append", key.device).cache_append(keys, values, key, value, length)
    increment_version((keys, values))
