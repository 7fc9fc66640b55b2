"""The routing ops in pure PyTorch, on any device; nothing waits for the device."""

from __future__ import annotations

import torch

from kbit.format.autocast import without_autocast


def moe_logits(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, last: torch.Tensor | None = None
) -> torch.Tensor:
    """`kbit::moe_logits`: [T, E] of `dtype`, or [T, E + 1] with a last row."""
    rows = (weight,) if last is None else (weight, last)
    with without_autocast(x.device):
        logits = [torch.nn.functional.linear(x.to(dtype), each.to(dtype)) for each in rows]
    return logits[0] if last is None else torch.cat(logits, dim=-1)


def moe_route(
    logits: torch.Tensor,
    scoring: str,
    normalize: bool,
    bias: torch.Tensor | None,
    factor: float,
    shared: str,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """`kbit::moe_route` into ids [T, U] and weights [T, U]."""
    logits = logits.float()
    if shared:
        gates = logits[:, -1].sigmoid() if shared == "sigmoid" else 1.0
        logits = logits[:, :-1] if shared == "sigmoid" else logits
        ids[:, -1], weights[:, -1] = logits.shape[1], gates
        ids, weights = ids[:, :-1], weights[:, :-1]
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    order = torch.sort(
        scores if bias is None else scores + bias, dim=-1, descending=True, stable=True
    ).indices
    ids.copy_(order[:, : ids.shape[1]])
    chosen = scores.gather(1, ids)
    if normalize:
        # Sigmoids may all be 0.
        chosen = chosen / (chosen.sum(-1, keepdim=True) + (1e-20 if scoring == "sigmoid" else 0.0))
    weights.copy_(chosen * factor)


def moe_align(ids: torch.Tensor, source: torch.Tensor, bounds: torch.Tensor, inverse: torch.Tensor) -> None:
    """`kbit::moe_align` into source [T * U], bounds [E + 1] and inverse [T, U], all int32."""
    experts, choices = bounds.shape[0] - 1, ids.shape[1]
    flat = ids.reshape(-1)
    keys = torch.where((flat >= 0) & (flat < experts), flat, experts)
    keys, order = torch.sort(keys, stable=True)
    # Unlike bincount, searchsorted needs no look at the largest id, which on a GPU would wait for it.
    bounds.copy_(torch.searchsorted(keys, torch.arange(experts + 1, device=ids.device, dtype=ids.dtype)))
    source.copy_(torch.div(order, max(1, choices), rounding_mode="floor"))
    slots = torch.arange(flat.shape[0], device=ids.device, dtype=torch.int32)
    inverse.view(-1).scatter_(0, order, slots)


def moe_combine(
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    bounds: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """`kbit::moe_combine` into out [T, H]."""
    if not y.shape[0]:
        out.zero_()
        return
    end = y.shape[0] if bounds is None else bounds[-1].clamp(max=y.shape[0])
    mine = (inverse >= 0) & (inverse < end)
    rows = y.index_select(0, torch.where(mine, inverse, 0).flatten()).view(*inverse.shape, y.shape[1])
    products = rows.float() * weights.unsqueeze(-1).float()
    products.masked_fill_(~mine.unsqueeze(-1), 0.0)  # rows of no expert may hold anything, NaN too
    total = y.new_zeros(out.shape, dtype=torch.float32)
    for choice in range(inverse.shape[1]):
        total += products[:, choice]
    out.copy_(total)
