"""A token's step of attention with shared heads, in PyTorch: the definition that the kernel is tested
against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.backends.reference.heads import append_heads


def attention_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
    eps: float,
    plus_one: bool,
    round_first: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::attention_step`, into `out` [B, H, D]."""
    made = query.new_empty(query[:, None].shape)
    q, k, v, its_cos, its_sin = (x[:, None] for x in (query, key, value, cos, sin))
    cache = keys, values, length
    append_heads(q, k, v, query_norm, key_norm, its_cos, its_sin, *cache, eps, plus_one, round_first, made)
    shared, room = query.shape[1] // keys.shape[1], keys.shape[2]
    there = torch.arange(room, device=query.device) <= length
    scores = query.new_zeros(1, 1, 1, room).masked_fill_(~there, -torch.inf)
    if mask is not None:
        scores = scores + mask[:, None, None]
    # Copies for every query head, as transformers makes them; rows that nothing was written to may be NaN.
    k, v = (x.masked_fill(~there[:, None], 0.0).repeat_interleave(shared, 1) for x in (keys, values))
    y = attend(made.transpose(1, 2), k, v, scores, scaling)
    y = y[:, :, 0].masked_fill((scores[:, :, 0] == -torch.inf).all(-1, keepdim=True), 0.0)
    out.copy_(y if gate is None else y * torch.sigmoid(gate))


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention of [B, H, T, D] to as many heads; the mask is added to scores.

    On GPUs by its formula in float32, whatever PyTorch would choose: of 2.11, others there give other bits
    each time, and wrong numbers for queries whose rows do not begin at multiples of 16 bytes.
    """
    if not query.is_cuda:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    by_formula = torch.ops.aten._scaled_dot_product_attention_math
    tensors = (x.float() for x in (query, keys, values, mask))
    return by_formula(*tensors, scale=scaling)[0].to(query.dtype)
