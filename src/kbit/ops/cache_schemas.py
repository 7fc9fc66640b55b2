"""New keys and values into a cache of a fixed size as one op: schema, checks, and the fake kernel.

    torch.ops.kbit.cache_append(keys, values, key, value, length)

writes key [B, H, T, D] and value [B, H, T, D'] to rows `length` and on of keys [B, H, L, D] and values
[B, H, L, D'], as transformers' `StaticLayer.update` does, whose tensors they are. `length`, an int64 of the
same device, is read there and stays; rows beyond the cache are dropped.
"""

from __future__ import annotations

import torch

from kbit.ops import operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "cache_append(Tensor(a!) keys, Tensor(b!) values, Tensor key, Tensor value, Tensor length) -> ()",
    tags=TAGS,
)


def check(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor
) -> None:
    """Check the arguments of `kbit::cache_append`.

    Raises:
        TypeError: dtypes do not belong together.
        ValueError: shapes or devices do not belong together, or a cache is not contiguous.
    """
    for name, cache, new in (("key", keys, key), ("value", values, value)):
        if cache.dtype != new.dtype:
            raise TypeError(
                f"cache_append: {name} is {new.dtype}, its cache {cache.dtype}. Cast one of them."
            )
        four = cache.dim() == new.dim() == 4 and cache.is_contiguous()
        if not four or cache.shape[:2] != new.shape[:2] or cache.shape[3] != new.shape[3]:
            raise ValueError(
                f"cache_append: {name} must be [B, H, T, D] and its cache [B, H, L, D], contiguous, got "
                f"{tuple(new.shape)} and {tuple(cache.shape)} with strides {cache.stride()}."
            )
    if keys.shape[:3] != values.shape[:3] or key.shape[:3] != value.shape[:3] or keys.dtype != values.dtype:
        raise ValueError(
            "cache_append: keys and values must be alike in all but columns, got "
            f"{keys.dtype} {tuple(keys.shape)} and {values.dtype} {tuple(values.shape)}."
        )
    operand_checks.one_length("cache_append", length)
    devices = {str(tensor.device) for tensor in (keys, values, key, value, length)}
    if len(devices) > 1:
        raise ValueError(f"cache_append: tensors are on {' and '.join(sorted(devices))}. Move them to one.")


@torch.library.register_fake("kbit::cache_append", lib=LIBRARY)
def cache_append(keys, values, key, value, length):  # noqa: D103
    check(keys, values, key, value, length)
