"""Attention of tokens behind those that a cache holds, in PyTorch: the definition that others are tested
against."""

from __future__ import annotations

import math

import torch

from kbit.backends.reference.attention import attend


def attention_rest(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """`kbit::attention_rest`, into `out` [B, T, H, D]."""
    tokens, shared = query.shape[2], query.shape[1] // keys.shape[1]
    at, own = (torch.arange(count, device=query.device) for count in (keys.shape[2], tokens))
    first = length.view(1)
    there, unseen = at < first + tokens, at > (first + own)[:, None]
    mask = query.new_zeros(unseen.shape).masked_fill_(unseen, -math.inf)
    # Copies for every query head, as transformers makes them; rows that nothing was written to may be NaN.
    k, v = (x.masked_fill(~there[:, None], 0.0).repeat_interleave(shared, 1) for x in (keys, values))
    y = attend(query, k, v, mask, scaling)
    out.copy_(y.transpose(1, 2))
