"""Multi-head latent attention of whole prompts, with few copies of queries and keys.

transformers turns a part of every head's query and the key that all heads share, joins each query anew, and
joins keys of all heads from what latents were expanded to. `kbit::latent_heads` turns queries where they are
and writes keys at once: half of the bytes, in one kernel.

It serves layers whose class does just that, which is tried first, as in `latent_attention`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.backends.cuda.latent_prompts import takes
from kbit.integrations.transformers.attention import (
    PROMPTS,
    causal_attention,
    causal_without_masks,
    runs_by,
)
from kbit.integrations.transformers.attention_steps import TRIED_BATCH, Tried, is_plain_call, normals, tried
from kbit.integrations.transformers.cache_argument import cache_in, with_cache, without_cache
from kbit.integrations.transformers.latent_attention import (
    TOLERANCE,
    WAYS,
    fused_latents,
    on_other_parts,
    query_of,
)
from kbit.nn.attention_layers import EXPAND, LATENT, NORM
from kbit.nn.standing_in import is_on_gpu, trial
from kbit.nn.support import is_apart
from kbit.ops import checks

_TRIED_TOKENS = 3
_QUERY = ("q_proj", "q_b_proj")  # what makes queries, one of them
# By layer and forward: whether pairs of neighbouring columns are turned; None where that does something else.
_forms: Tried[bool | None] = Tried()


@contextlib.contextmanager
def fused_latent_prompts(model: Any) -> Iterator[None]:
    """A model's layers of latent attention run as here where that gives what they give.

    For whole prompts: within `causal_without_masks`, with caches that hold nothing yet, or without.
    """
    with fused_latents(model):
        yield


def _prompt(
    layer: Any, own: Callable[..., Any], x: torch.Tensor, named: dict[str, Any]
) -> torch.Tensor | None:
    interleaved = _form(layer, own, x, named)
    if interleaved is None:
        return None
    return attend(layer, x, cache=cache_in(named), interleaved=interleaved, **without_cache(named))


WAYS.append(_prompt)


def attend(
    layer: Any,
    x: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: None,
    cache: Any,
    interleaved: bool,
    **named: Any,
) -> torch.Tensor:
    """A layer's forward for a prompt; [batch, tokens, hidden size].

    Args:
        layer: of transformers.
        x: [batch, tokens, hidden size].
        position_embeddings: cos and sin, [batch or 1, tokens, columns that are turned].
        attention_mask: None.
        cache: an empty one, or None.
        interleaved: see `kbit.ops.latent_heads_schemas`.
        named: what attention is told besides.
    """
    own, turned, columns = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.kv_lora_rank
    rows = (*x.shape[:2], -1)
    query = query_of(layer, x).view(*rows, own + turned)
    latent, key = layer._modules[LATENT](x).split([columns, turned], -1)
    latent = layer._modules[NORM](latent)
    expanded = layer._modules[EXPAND](latent).view(*rows, own + layer.v_head_dim)
    keys, key = torch.ops.kbit.latent_heads(query, expanded, key, *position_embeddings, interleaved)
    if cache is not None:
        cache.update(latent[:, None], key[:, None], layer.layer_idx)
    query, keys, values = (one.transpose(1, 2) for one in (query, keys, expanded[..., own:]))
    how: dict[str, Any] = {"dropout": 0.0, "scaling": layer.scaling, **named}
    made, _ = causal_attention(layer, query, keys, values, attention_mask, **how)
    return layer.o_proj(made.reshape(rows).contiguous())


def _form(layer: Any, own: Callable[..., Any], x: Any, named: dict[str, Any]) -> bool | None:
    """Whether a layer that a prompt can run so is interleaved; None where it runs by its own forward."""
    if not is_plain_call() or layer.training:
        return None
    if type(x) is not torch.Tensor or x.dim() != 3 or x.shape[1] < 2 or not is_on_gpu(x):
        return None
    if x.dtype not in checks.HALF_DTYPES:
        return None
    if not runs_by(layer.config, PROMPTS) or named.get("attention_mask", x) is not None:
        return None
    angles = named.get("position_embeddings")
    if not isinstance(angles, tuple) or any(one.dtype != x.dtype or one.dim() != 3 for one in angles):
        return None
    if not takes(layer.qk_nope_head_dim, layer.qk_rope_head_dim):
        return None
    if any(is_apart(layer._modules[name]) for name in _QUERY if layer._modules.get(name) is not None):
        return None  # who listens gets queries that are turned later
    ways = (pairs for pairs in (True, False) if _is(layer, own, pairs))
    return tried(_forms, layer, own, lambda: next(ways, None))


@trial
def _is(layer: Any, own: Callable[..., Any], interleaved: bool) -> bool:
    """Whether a layer's own forward gives what `attend` gives, tried on a CPU in float32."""
    from transformers.cache_utils import Cache, DynamicLayer

    normal = normals(torch.float32)
    x = normal(TRIED_BATCH, _TRIED_TOKENS, 8)
    made = on_other_parts(layer, x, normal)
    half = layer.qk_rope_head_dim // 2
    cos, sin = (normal(TRIED_BATCH, _TRIED_TOKENS, half).repeat(1, 1, 2) for _ in range(2))
    given: dict[str, Any] = {"position_embeddings": (cos, sin), "attention_mask": None}
    caches = [Cache(layers=[DynamicLayer()]) for _ in range(2)]
    with causal_without_masks():
        want = own(made, hidden_states=x, **with_cache(caches[0], given))[0]
        have = attend(made, x, cache=caches[1], interleaved=interleaved, **given)
    held = [(cache.layers[0].keys, cache.layers[0].values) for cache in caches]
    pairs = zip((want, *held[0]), (have, *held[1]), strict=True)
    return all(bool(((a - b).abs() <= TOLERANCE * a.abs().max()).all()) for a, b in pairs)
