"""A step of gated delta linear attention in PyTorch: the definition that the kernel is tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.ops.gated_delta_schemas import heads_of_keys


def gated_delta_step(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """`kbit::gated_delta_step` into `out` [B, V * D]; rounds where transformers' modules do."""
    batch, v_heads, dim, _ = state.shape
    k_heads = heads_of_keys(projected, state)
    ratio = v_heads // k_heads
    parts = projected.view(batch, k_heads, -1).split([dim, dim, ratio * dim, ratio * dim], -1)
    *convolved, gate = (part.reshape(batch, -1) for part in parts)
    beta, alpha = (part.reshape(batch, -1) for part in gates.view(batch, k_heads, -1).split(ratio, -1))

    token = torch.cat(convolved, -1)[..., None]
    window.copy_(torch.cat((window[..., 1:], token), -1))
    channels = F.silu((window.float() * taps.float()).sum(-1).to(projected.dtype)).float()
    query, key, value = channels.split([k_heads * dim, k_heads * dim, v_heads * dim], -1)
    query, key = (x.view(batch, k_heads, dim).repeat_interleave(ratio, 1) for x in (query, key))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))

    decay = (-log_decay.float().exp() * F.softplus(alpha.float() + bias.float())).exp()
    state *= decay[..., None, None]
    known = (state * key[..., None]).sum(-2)
    change = (value.view(batch, v_heads, dim) - known) * beta.sigmoid().float()[..., None]
    state += key[..., None] * change[..., None, :]
    y = (state * (query / dim**0.5)[..., None]).sum(-2).to(projected.dtype).float()

    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    y = (norm * y.to(projected.dtype)).float() * F.silu(gate.float()).view_as(y)
    out.copy_(y.view(batch, -1))
