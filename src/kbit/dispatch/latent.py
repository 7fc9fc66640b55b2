"""Implementations of the ops of multi-head latent attention, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import latent_heads_schemas, latent_schemas


@implement(latent_schemas.NAME)
def _latent_attention_step(
    query,
    absorbed,
    latent,
    norm,
    cos,
    sin,
    mask,
    latents,
    keys,
    length,
    scaling,
    eps,
    plus_one,
    round_first,
    interleaved,
):
    given = query, absorbed, latent, norm, cos, sin, mask, latents, keys, length
    settings = scaling, eps, plus_one, round_first, interleaved
    out = latent_schemas.latent_attention_step(*given, *settings)
    if out.numel():
        module = module_on_gpus(latent_schemas.NAME, query.device)
        module.latent_attention_step(*given, *settings, out)
    increment_version((latents, keys))
    return out


@implement(latent_heads_schemas.NAME)
def _latent_heads(query, expanded, key, cos, sin, interleaved):
    given = query, expanded, key, cos, sin, interleaved
    out = latent_heads_schemas.latent_heads(*given)
    if query.numel():
        module_on_gpus(latent_heads_schemas.NAME, query.device).latent_heads(*given, *out)
    increment_version((query,))
    return out
