"""A step of multi-head latent attention, in PyTorch: the definition that the kernels are tested against."""

from __future__ import annotations

import math

import torch

from kbit.backends.reference.caches import cache_append
from kbit.backends.reference.norm import rms_norm
from kbit.backends.reference.position import rotary


def latent_attention_step(
    query: torch.Tensor,
    absorbed: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    latents: torch.Tensor,
    keys: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
    eps: float,
    plus_one: bool,
    round_first: bool,
    interleaved: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::latent_attention_step`, into `out` [B, H, C]; scores and sums in float32."""
    columns, room = absorbed.shape[2], latents.shape[1]
    turned, key = turn(query, latent[:, None, columns:], cos, sin, interleaved)
    normed = latent.new_empty(len(latent), columns)
    rms_norm(latent[:, :columns], norm, eps, plus_one, round_first, normed)
    rows = normed[:, None, None], key[:, :, None]
    cache_append(latents[:, None], keys[:, None], *rows, length)
    scores = (absorbed.float() @ latents.float().mT + turned.float() @ keys.float().mT) * scaling
    if mask is not None:
        scores = scores + mask.float()[:, None]
    there = torch.arange(room, device=query.device) <= length
    scores = scores.masked_fill(~there, -math.inf)
    weights = scores.softmax(-1).masked_fill((scores == -math.inf).all(-1, keepdim=True), 0.0)
    out.copy_(weights @ latents.float().masked_fill(~there[:, None], 0.0))


def turn(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """query and key [B, heads, R] by the angles of their positions; see `kbit.ops.latent_schemas`."""
    if interleaved:
        query, key = (x.unflatten(-1, (-1, 2)).mT.flatten(-2) for x in (query, key))
    turned, its_key = query.new_empty(query.shape), key.new_empty(key.shape)
    angles = cos[:, None], sin[:, None]
    rotary(query[:, :, None], key[:, :, None], *angles, turned[:, None], its_key[:, None])
    return turned, its_key


def latent_heads(
    query: torch.Tensor,
    expanded: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    keys: torch.Tensor,
    turned: torch.Tensor,
) -> None:
    """`kbit::latent_heads` into `keys` [B, T, H, N + R] and `turned` [B, T, R]."""
    own = query.shape[3] - key.shape[2]
    its_query, its_key = query[..., own:].transpose(1, 2), key[:, None]
    made = its_query.new_empty(its_query.transpose(1, 2).shape)
    rotary(its_query, its_key, cos, sin, made, turned[:, :, None], interleaved)
    query[..., own:] = made
    keys[..., :own] = expanded[..., :own]
    keys[..., own:] = turned[:, :, None]
