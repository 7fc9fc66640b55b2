"""What attention layers do in decoding steps between their projections, in one kernel.

Before attention that are four small kernels for new tokens: the norms of queries and keys, their rotary
embeddings, and what goes to the cache. `kbit::append_heads` is one of them. `kbit::attention_step` is that
for one token, with attention and its gate. They serve layers whose class does just that: its forward is tried
first, with stand-ins for its projections, and stays where it gives something else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from kbit.backends.cuda.attention import takes
from kbit.integrations.transformers.attention import asks_for_more, attention
from kbit.integrations.transformers.attention_steps import (
    TRIED_BATCH,
    TRIED_LENGTH,
    TRIED_ROOM,
    GivenAnew,
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
from kbit.nn.attention_layers import LAYERS, OUT, PROJECTIONS
from kbit.nn.mixins import stand_in
from kbit.nn.standing_in import trial

_NORMS = "q_norm", "k_norm"
_LARGE = 30  # what a layer is tried on, so that one which clips its queries is seen to
_ATTRIBUTES = ("config", "head_dim", "layer_idx", "scaling")
_kinds = Kinds(LAYERS, _ATTRIBUTES)


class Form(NamedTuple):
    """What a layer's class does.

    Attributes:
        gated: whether each head's query is followed by a gate of what attention gives.
        one_op: whether that and attention are what `kbit::attention_step` computes, for one token.
    """

    gated: bool
    one_op: bool


# By layer, forward, and how many columns of its heads are turned: None for a class that does something else.
_forms: Tried[Form | None] = Tried()


class Norms(NamedTuple):
    """Of a layer's queries and keys: their weights, and eps, plus_one and round_first of `kbit::rms_norm`."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    how: tuple[float, bool, bool]


@contextlib.contextmanager
def fused_heads(model: Any) -> Iterator[None]:
    """A model's attention layers run as here where that gives what they give."""
    with _kinds.run(model, _fused):
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(layer: Any, hidden_states: Any, *more: Any, **named: Any) -> Any:
        form = None if more else _form(layer, own, hidden_states, named)
        if form is None:
            return own(layer, hidden_states, *more, **named)
        cached, named = cache_in(named).layers[layer.layer_idx], without_cache(named)
        settle(cached)
        form = form._replace(one_op=form.one_op and _is_a_step(layer, hidden_states, cached, named))
        made = attend(layer, hidden_states, cached=cached, form=form, **named)
        grow(cached, hidden_states.shape[1])
        return made

    return forward


def attend(
    layer: Any,
    x: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    cached: Any,
    form: Form,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """A layer's forward, but that its cache does not grow.

    Args:
        layer: of transformers.
        x: [batch, tokens, hidden size].
        position_embeddings: cos and sin, [batch or 1, tokens, columns that are turned].
        attention_mask: see `attention`.
        cached: the cache's layer.
        form: of the layer; by one op is a single token alone, with an additive mask.
        named: further arguments of transformers.
    """
    shape = *x.shape[:2], -1, layer.head_dim
    query, key, value = (layer._modules[name](x) for name in PROJECTIONS)
    query = query.view(*shape[:-1], shape[-1] * (2 if form.gated else 1))
    gate = query[..., layer.head_dim :] if form.gated else None
    norms = _norms(layer)
    assert norms is not None
    new = query[..., : layer.head_dim], key.view(shape), value.view(shape)
    cache = cached.keys, cached.values, cached.cumulative_length
    if form.one_op:
        assert attention_mask is not None
        y = torch.ops.kbit.attention_step(
            *(part if part is None else part[:, 0] for part in (*new, gate)),
            *(norms.query, norms.key, *(angle[:, 0] for angle in position_embeddings)),
            *(attention_mask[:, 0, 0], *cache, layer.scaling, *norms.how),
        )
        return layer._modules[OUT](y.view(*x.shape[:2], -1)), None
    query = torch.ops.kbit.append_heads(
        *new, norms.query, norms.key, *position_embeddings, *cache, *norms.how
    )
    y, weights = attention(
        layer, query, cached.keys, cached.values, attention_mask, scaling=layer.scaling, **named
    )
    y = y if gate is None else y * torch.sigmoid(gate)
    return layer._modules[OUT](y.reshape(*x.shape[:2], -1)), weights


def _is_a_step(layer: Any, x: torch.Tensor, cached: Any, named: dict[str, Any]) -> bool:
    """Whether `kbit::attention_step` may take what a layer is given, and has a kernel for it."""
    keys, mask, turned = cached.keys, named["attention_mask"], named["position_embeddings"][0].shape[-1]
    if x.shape[1] != 1 or asks_for_more(named) or not takes(x.device, layer.head_dim, turned):
        return False
    if mask is None or mask.dtype != x.dtype or mask.dim() != 4 or len(mask) not in (1, len(x)):
        return False
    return mask.shape[1:] == (1, 1, keys.shape[2]) and keys.shape == cached.values.shape


def _form(layer: Any, own: Callable[..., Any], x: Any, named: dict[str, Any]) -> Form | None:
    """That of a layer which a step can run so; None where it has to run by its own forward."""
    norms = _norms(layer)
    if norms is None or cached_layer(layer, x, named, (norms.query, norms.key)) is None:
        return None
    turned = named["position_embeddings"][0].shape[-1]

    def find() -> Form | None:
        apart = (Form(gated, False) for gated in (False, True))
        found = next((form for form in apart if _is(layer, own, turned, form)), None)
        return found and Form(found.gated, bool(_is(layer, own, turned, Form(found.gated, True))))

    return tried(_forms, layer, (own, turned), find)


def _norms(layer: Any) -> Norms | None:
    """The norms of a layer's queries and keys, or none; None for some that the kernel does not have."""
    query, key = (layer._modules.get(name) for name in _NORMS)
    if query is None and key is None:
        return Norms(None, None, (0.0, False, True))
    if not all(is_plain_norm(norm, layer.head_dim) for norm in (query, key)):
        return None
    return Norms(query.weight, key.weight, query.how) if query.how == key.how else None


@trial
def _is(layer: Any, own: Callable[..., Any], turned: int, form: Form) -> bool:
    """Whether a layer's own forward gives what `attend` gives, tried on a CPU in bfloat16."""
    normal = normals(torch.bfloat16)
    made = stand_in(layer)
    x = normal(TRIED_BATCH, 1, 8)
    angles = normal(TRIED_BATCH, 1, turned), normal(TRIED_BATCH, 1, turned)
    mask = normal(TRIED_BATCH, 1, 1, TRIED_ROOM)
    mask[..., TRIED_LENGTH + 1 :] = -torch.inf
    projections = {
        name: GivenAnew(x, _LARGE * normal(TRIED_BATCH, 1, layer._modules[name].out_features))
        for name in PROJECTIONS
    }
    made._modules = {**layer._modules, **projections, OUT: nn.Identity()}
    for name in _NORMS:
        if (norm := layer._modules.get(name)) is not None:
            made._modules[name] = stand_in(norm)
            made._modules[name]._parameters = {"weight": nn.Parameter(normal(layer.head_dim), False)}
    made.layer_idx = 0
    heads = made.k_proj.given[1].shape[-1] // layer.head_dim
    before = [normal(TRIED_BATCH, heads, TRIED_LENGTH, layer.head_dim) for _ in range(2)]
    given: dict[str, Any] = {"position_embeddings": angles, "attention_mask": mask}
    want, its_cache = of_cache(before, lambda cache: own(made, hidden_states=x, **with_cache(cache, given)))
    have, cached = of_cache(before, lambda cache: attend(made, x, cached=cache.layers[0], form=form, **given))
    same = len(want) == len(have) and want[1] is have[1] and torch.equal(want[0], have[0])
    return same and all(map(torch.equal, its_cache, cached))
