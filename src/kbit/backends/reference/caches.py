"""Keys and values into a cache, in PyTorch: the definition that the kernel is tested against."""

from __future__ import annotations

import torch


def cache_append(
    keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: torch.Tensor
) -> None:
    """`kbit::cache_append`."""
    tokens = torch.arange(keys.shape[2], device=keys.device) - length.view(1)  # that belong into each row
    new = ((tokens >= 0) & (tokens < key.shape[2])).view(-1, 1)
    tokens = tokens.clamp(0, key.shape[2] - 1)
    keys.copy_(torch.where(new, key.index_select(2, tokens), keys))
    values.copy_(torch.where(new, value.index_select(2, tokens), values))
