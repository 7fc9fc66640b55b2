"""Keys and values into a cache, csrc/cache_append.cu: which it takes, and its launch."""

from __future__ import annotations

import torch

from kbit.backends.cuda import elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import caches as reference

_FORMAT = "QQQQQ" + "Q" * 6 + "i" * 6
_SPEC = KernelSpec.make("cache_append.cu")


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_SPEC]


def cache_append(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor
) -> None:
    """`kbit::cache_append`; the reference where the kernel may not.

    Args:
        keys, values: [B, H, L, D] and [B, H, L, D'], contiguous.
        key, value: [B, H, T, D] and [B, H, T, D'], of the same dtype, one element or more.
        length: int64 [1] or [].

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    batch, heads, tokens, _ = key.shape
    strides = operands.all_pieces(key, value, keys, values)
    wide = [tensor.shape[-1] * tensor.element_size() for tensor in (keys, values)]
    count = batch * heads * tokens * sum(wide) // 16
    if strides is None or any(width % 16 for width in wide) or count > elementwise.MOST_THREADS:
        reference.cache_append(keys, values, key, value, length)
        return
    of_key, of_value, *_ = strides
    index = key.device.index
    kernel = launcher.load(_SPEC, index, _FORMAT)
    places = operands.addresses(key, value, keys, values, length)
    sizes = (count, heads, tokens, keys.shape[2], *(width // 16 for width in wide))
    elementwise.launch(index, kernel, count, (*places, *of_key, *of_value, *sizes))
