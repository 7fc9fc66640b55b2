"""Implementation of `kbit::latent_attention_step`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from torch.autograd.graph import increment_version

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import implement
from kbit.ops import latent_schemas


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
    latent_schemas.check(*given, eps)
    out = latent_schemas.output(absorbed)
    if out.numel():
        module = module_on_gpus(latent_schemas.NAME, query.device)
        module.latent_attention_step(*given, scaling, eps, plus_one, round_first, interleaved, out)
    increment_version((latents, keys))
    return out
