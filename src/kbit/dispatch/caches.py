"""Implementation of `kbit::cache_append`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from kbit.backends import reference
from kbit.dispatch.backends import backend_for
from kbit.dispatch.ops import implement
from kbit.ops import cache_schemas


@implement("cache_append")
def _cache_append(keys, values, key, value, length):
    cache_schemas.check(keys, values, key, value, length)
    if key.numel() + value.numel() and keys.shape[2]:
        # There is no CPU kernel: PyTorch's operators serve there, whichever backend multiplies.
        module = backend_for("cache_append", key.device, torch.uint8).module if key.is_cuda else reference
        module.cache_append(keys, values, key, value, length)
    increment_version((keys, values))
