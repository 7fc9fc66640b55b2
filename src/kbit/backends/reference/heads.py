"""New tokens' heads into a cache, in PyTorch: the definition that the kernel is tested against."""

from __future__ import annotations

import torch

from kbit.backends.reference.caches import cache_append
from kbit.backends.reference.norm import rms_norm
from kbit.backends.reference.position import rotary


def append_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    eps: float,
    plus_one: bool,
    round_first: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::append_heads`, queries into `out` [B, T, H, D]."""

    def normed(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        y = x
        if weight is not None:
            y = x.new_empty(x.shape)
            rms_norm(x, weight, eps, plus_one, round_first, y)
        return y.transpose(1, 2)

    turned = key.new_empty(key.shape)
    rotary(normed(query, query_norm), normed(key, key_norm), cos, sin, out, turned)
    cache_append(keys, values, turned.transpose(1, 2), value.transpose(1, 2), length)
