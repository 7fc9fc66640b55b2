"""Multi-head latent attention in decoding steps, without keys and values of all heads.

The cache holds a latent a token, and transformers expands all of it to keys and values at every step: a
product with as many rows as the cache has, of which a step needs one. `kbit::latent_attention_step` attends
to latents as they are. The weight that would expand keys multiplies the query instead, and that of values
what comes back: the same sums in another order (DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2).

It serves layers whose class does just that: its forward is tried first, with stand-ins for its projections,
and stays where it gives something else.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from kbit.backends.cuda.latent import takes
from kbit.format.versions import version_of
from kbit.integrations.transformers.attention import asks_for_more
from kbit.integrations.transformers.attention_steps import (
    TRIED_BATCH,
    TRIED_LENGTH,
    TRIED_ROOM,
    Given,
    Kinds,
    Tried,
    cached_layer,
    is_plain_norm,
    normals,
    of_cache,
    tried,
)
from kbit.integrations.transformers.cache_argument import cache_in, with_cache, without_cache
from kbit.integrations.transformers.static_caches import grow, settle
from kbit.nn.attention_layers import EXPAND, LATENT, LATENT_LAYERS, NORM, OUT
from kbit.nn.linear import KbitLinear
from kbit.nn.mixins import stand_in
from kbit.nn.standing_in import trial
from kbit.nn.support import is_apart

_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
KINDS = Kinds((*LATENT_LAYERS, OUT), ("config", "layer_idx", "scaling", *_SIZES))
TOLERANCE = 1e-3  # of the largest result, in float32, where another order of sums changes some 1e-6
# By layer and forward: whether pairs of neighbouring columns are turned; None where that does something else.
_forms: Tried[bool | None] = Tried()
# By layer that expands: from what its weight was decoded, and that.
_decoded: weakref.WeakKeyDictionary[Any, tuple[Any, torch.Tensor]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def fused_latents(model: Any) -> Iterator[None]:
    """A model's layers of latent attention run in the first of `WAYS` that takes a call.

    Which it is depends on what attention is for in the thread, since all threads share the layers' classes.
    """
    with KINDS.run(model, _fused):
        yield


def renew_decoded(model: Any) -> None:
    """Have the weights that a model's steps decoded be those of its layers, which may have loaded others."""
    for module in model.modules():
        if (known := _decoded.get(module)) is not None:
            (_, dtype, device), _ = known
            held = [part for part in module._parameters.values() if part is not None]
            if all(part.device == device for part in (*held, module.codebook)):
                _decoded_weight(module, dtype)


def forget_decoded(model: Any) -> None:
    """Free the weights that a model's steps decoded; recorded steps must not run any more."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        _decoded.pop(module, None)


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(layer: Any, hidden_states: Any, *more: Any, **named: Any) -> Any:
        for way in () if more else WAYS:
            made = way(layer, own, hidden_states, named)
            if made is not None:
                return made, None
        return own(layer, hidden_states, *more, **named)

    return forward


def _step(layer: Any, own: Callable[..., Any], x: torch.Tensor, named: dict[str, Any]) -> torch.Tensor | None:
    interleaved = _form(layer, own, x, named)
    weight = None if interleaved is None else _weight(layer._modules[EXPAND], x)
    if interleaved is None or weight is None:
        return None
    cached = cache_in(named).layers[layer.layer_idx]
    settle(cached)
    given = named["position_embeddings"], named["attention_mask"]
    made = attend(layer, x, *given, cached, weight, interleaved)
    grow(cached, 1)
    return made


# What may take the place of a layer's forward: (layer, that forward, x, further arguments) to its result, or
# None where the call is no such one.
Way = Callable[[Any, Callable[..., Any], torch.Tensor, dict[str, Any]], torch.Tensor | None]
WAYS: list[Way] = [_step]


def attend(
    layer: Any,
    x: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    cached: Any,
    weight: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """A layer's forward for one token, but that its cache does not grow; [batch, 1, hidden size].

    Args:
        layer: of transformers.
        x: [batch, 1, hidden size].
        position_embeddings: cos and sin, [batch or 1, 1, columns that are turned].
        attention_mask: [batch or 1, 1, 1, room], additive, or None.
        cached: the cache's layer: latents are its keys, turned keys its values.
        weight: that expands latents to keys and values, of x's dtype.
        interleaved: see `kbit.ops.latent_schemas`.
    """
    columns, own = layer.kv_lora_rank, layer.qk_nope_head_dim
    weight = weight.view(-1, own + layer.v_head_dim, columns)
    batch, heads = len(x), len(weight)
    query = query_of(layer, x).reshape(batch, heads, -1)
    latent, norm = layer._modules[LATENT](x).squeeze(1), layer._modules[NORM]
    absorbed = torch.bmm(query[..., :own].transpose(0, 1), weight[:, :own]).transpose(0, 1)
    mask = None if attention_mask is None else attention_mask[:, 0, 0]
    y = torch.ops.kbit.latent_attention_step(
        *(query[..., own:], absorbed, latent, norm.weight, *(angle[:, 0] for angle in position_embeddings)),
        *(mask, cached.keys.squeeze(1), cached.values.squeeze(1), cached.cumulative_length, layer.scaling),
        *(*norm.how, interleaved),
    )
    values = x.new_empty(batch, heads, layer.v_head_dim)
    torch.bmm(y.transpose(0, 1), weight[:, own:].mT, out=values.transpose(0, 1))
    return layer._modules[OUT](values.view(batch, 1, -1))


def query_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """All heads' queries of tokens, [batch, tokens, heads * columns]."""
    if layer._modules.get("q_a_proj") is None:
        return layer.q_proj(x)
    return layer.q_b_proj(layer.q_a_layernorm(layer.q_a_proj(x)))


def _form(layer: Any, own: Callable[..., Any], x: Any, named: dict[str, Any]) -> bool | None:
    """Whether a layer that a step can run so is interleaved; None where it has to run by its own forward."""
    columns, turned, norm = layer.kv_lora_rank, layer.qk_rope_head_dim, layer._modules[NORM]
    if not is_plain_norm(norm, columns) or not takes(columns, turned):
        return None
    mask = named.get("attention_mask")
    cached = cached_layer(layer, x, named, (norm.weight, mask))
    if cached is None or asks_for_more(without_cache(named)) or x.shape[1] != 1:
        return None
    rows = (len(x), 1, cached.max_cache_len)
    if cached.keys.shape != (*rows, columns) or cached.values.shape != (*rows, turned):
        return None
    if mask is not None and (mask.dim() != 4 or mask.shape[1:] != (1, 1, cached.max_cache_len)):
        return None
    ways = (pairs for pairs in (True, False) if _is(layer, own, pairs))
    return tried(_forms, layer, own, lambda: next(ways, None))


def _weight(expand: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The weight of the layer that expands latents, in x's dtype; None if that computes something else.

    That of a quantized one is decoded once, and kept as long as the layer has the same codes.
    """
    if type(expand) not in (nn.Linear, KbitLinear) or expand.bias is not None:
        return None
    if is_apart(expand):
        return None
    weight = expand.weight
    if type(weight) not in (nn.Parameter, torch.Tensor) or weight.device != x.device:
        return None
    if type(expand) is nn.Linear:
        return weight if weight.dtype == x.dtype and weight.is_contiguous() else None
    return _decoded_weight(expand, x.dtype)


def _decoded_weight(expand: KbitLinear, dtype: torch.dtype) -> torch.Tensor:
    parts = expand.weight, expand.weight_scale, expand.codebook
    device = expand.codebook.device
    versions = tuple((part.data_ptr(), version_of(part)) for part in parts)
    key, known = _decoded.get(expand, (None, None))
    if key == (versions, dtype, device) and known is not None:
        return known
    with torch.inference_mode(False), torch.no_grad():  # a tensor that can be written again
        decoded = expand.dequantize(dtype)
    if known is not None and (known.dtype, known.device) == (dtype, device):
        decoded = known.copy_(decoded)  # where recorded steps read it
    _decoded[expand] = (versions, dtype, device), decoded
    return decoded


@trial
def _is(layer: Any, own: Callable[..., Any], interleaved: bool) -> bool:
    """Whether a layer's own forward gives what `attend` gives, tried on a CPU in float32."""
    normal = normals(torch.float32)
    columns, turned = layer.kv_lora_rank, layer.qk_rope_head_dim
    x = normal(TRIED_BATCH, 1, 8)
    made = on_other_parts(layer, x, normal)
    cos, sin = (normal(TRIED_BATCH, 1, turned // 2).repeat(1, 1, 2) for _ in range(2))
    mask = normal(TRIED_BATCH, 1, 1, TRIED_ROOM)
    mask[..., TRIED_LENGTH + 1 :] = -torch.inf
    before = [normal(TRIED_BATCH, 1, TRIED_LENGTH, size) for size in (columns, turned)]
    given: dict[str, Any] = {"position_embeddings": (cos, sin), "attention_mask": mask}
    want, its_cache = of_cache(
        before, lambda cache: own(made, hidden_states=x, **with_cache(cache, given))[0]
    )
    weight = made.kv_b_proj.weight
    have, cached = of_cache(
        before, lambda cache: attend(made, x, (cos, sin), mask, cache.layers[0], weight, interleaved)
    )
    pairs = zip((want, *its_cache), (have, *cached), strict=True)
    return all(bool(((a - b).abs() <= TOLERANCE * a.abs().max()).all()) for a, b in pairs)


def on_other_parts(layer: Any, x: torch.Tensor, normal: Callable[..., torch.Tensor]) -> Any:
    """A layer of the same class whose projections of x, and other parts, are made by `normal`."""
    (batch, tokens, _), columns, turned = x.shape, layer.kv_lora_rank, layer.qk_rope_head_dim
    expand = nn.Linear(columns, layer._modules[EXPAND].out_features, bias=False, device="meta")
    expand.weight = nn.Parameter(normal(expand.out_features, columns) * columns**-0.5, False)
    norm = stand_in(layer._modules[NORM])
    norm._parameters = {"weight": nn.Parameter(normal(columns), False)}
    heads = expand.out_features // (layer.qk_nope_head_dim + layer.v_head_dim)
    query = normal(batch, tokens, heads * (layer.qk_nope_head_dim + turned))
    parts: dict[str, nn.Module | None] = dict.fromkeys(layer._modules)
    parts |= {LATENT: Given(x, normal(batch, tokens, columns + turned)), NORM: norm}
    parts |= {EXPAND: expand, OUT: nn.Identity()}
    if layer._modules.get("q_a_proj") is None:
        parts["q_proj"] = Given(x, query)
    else:
        middle, normed = normal(batch, tokens, 8), normal(batch, tokens, 8)
        chain = {"q_a_proj": (x, middle), "q_a_layernorm": (middle, normed), "q_b_proj": (normed, query)}
        parts |= {name: Given(*pair) for name, pair in chain.items()}
    made = stand_in(layer)
    made._modules, made.layer_idx = parts, 0
    return made
