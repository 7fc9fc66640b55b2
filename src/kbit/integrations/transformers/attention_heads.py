"""What attention layers do in decoding steps between their projections and attention, in one kernel.

Of a token that are four small kernels: the norms of queries and keys, their rotary embeddings, and what goes
to the cache. `kbit::append_heads` is one. It serves layers whose class does just that: its forward is tried
first, with stand-ins for its projections, and stays where it gives something else.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from kbit.integrations.transformers.attention import NAME, attention
from kbit.integrations.transformers.standing_in import standing_in
from kbit.integrations.transformers.static_caches import appends, grow, settle
from kbit.nn.mixins import MixedIn, stand_in
from kbit.nn.norm import FusedNorm
from kbit.nn.support import has_own_forward
from kbit.ops import grad_checks

_PROJECTIONS, _OUT, _NORMS = ("q_proj", "k_proj", "v_proj"), "o_proj", ("q_norm", "k_norm")
_ATTRIBUTES = ("config", "head_dim", "layer_idx", "scaling")
_TRIED_BATCH, _TRIED_ROOM, _TRIED_LENGTH = 2, 5, 2
_classes: weakref.WeakKeyDictionary[Any, list[type[nn.Module]]] = weakref.WeakKeyDictionary()
# By layer, and by how many columns of its heads are turned: what its class does, None for something else.
_forms: weakref.WeakKeyDictionary[Any, dict[int, bool | None]] = weakref.WeakKeyDictionary()


class Norms(NamedTuple):
    """Of a layer's queries and keys: their weights, and eps, plus_one and round_first of `kbit::rms_norm`."""

    query: torch.Tensor | None
    key: torch.Tensor | None
    how: tuple[float, bool, bool]


def attention_classes(model: Any) -> list[type[nn.Module]]:
    """The classes of a model's attention layers, as far as they may be such ones."""
    if model not in _classes:
        kinds = {_with_forward(type(module)): None for module in model.modules() if _has_parts(module)}
        _classes[model] = [kind for kind in kinds if kind is not None]
    return _classes[model]


def _has_parts(module: nn.Module) -> bool:
    return {*_PROJECTIONS, _OUT} <= module._modules.keys() and vars(module).keys() >= {*_ATTRIBUTES}


def _with_forward(cls: type[Any]) -> type[nn.Module] | None:
    """The class that a layer's forward is of, below those that it is mixed with."""
    own: Any = (kind for kind in cls.__mro__ if "forward" in vars(kind) and not issubclass(kind, MixedIn))
    return next((kind for kind in own if kind is not nn.Module), None)


@contextlib.contextmanager
def fused_heads(model: Any) -> Iterator[None]:
    """A model's attention layers run as here where that gives what they give."""
    with contextlib.ExitStack() as stack:
        for kind in attention_classes(model):
            stack.enter_context(standing_in(kind, "forward", _fused))
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(layer: Any, hidden_states: Any, *more: Any, **named: Any) -> Any:
        gated = None if more else _form(layer, own, hidden_states, named)
        if gated is None:
            return own(layer, hidden_states, *more, **named)
        cached = named.pop("past_key_values").layers[layer.layer_idx]
        settle(cached)
        made = attend(layer, hidden_states, cached=cached, gated=gated, **named)
        grow(cached, hidden_states.shape[1])
        return made

    return forward


def attend(
    layer: Any,
    x: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None,
    cached: Any,
    gated: bool,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """A layer's forward, but that its cache does not grow.

    Args:
        layer: of transformers.
        x: [batch, tokens, hidden size].
        position_embeddings: cos and sin, [batch or 1, tokens, columns that are turned].
        attention_mask: see `attention`.
        cached: the cache's layer.
        gated: whether each head's query is followed by a gate of what attention gives.
        named: further arguments of transformers.
    """
    shape = *x.shape[:2], -1, layer.head_dim
    query, key, value = (layer._modules[name](x) for name in _PROJECTIONS)
    query = query.view(*shape[:-1], shape[-1] * (2 if gated else 1))
    gate = query[..., layer.head_dim :]
    norms = _norms(layer)
    assert norms is not None
    query = torch.ops.kbit.append_heads(
        *(query[..., : layer.head_dim], key.view(shape), value.view(shape), norms.query, norms.key),
        *(*position_embeddings, cached.keys, cached.values, cached.cumulative_length, *norms.how),
    )
    y, weights = attention(
        layer, query, cached.keys, cached.values, attention_mask, scaling=layer.scaling, **named
    )
    y = y * torch.sigmoid(gate) if gated else y
    return layer._modules[_OUT](y.reshape(*x.shape[:2], -1)), weights


def _form(layer: Any, own: Callable[..., Any], x: Any, named: dict[str, Any]) -> bool | None:
    """Whether a layer that a step can run so is gated; None where it has to run by its own forward."""
    from transformers.cache_utils import Cache, StaticLayer

    if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return None
    cache, position = named.get("past_key_values"), named.get("position_embeddings")
    if not isinstance(cache, Cache) or type(cache).update is not Cache.update or cache.offloading:
        return None
    if layer.training or layer.config._attn_implementation != NAME or layer.layer_idx >= len(cache.layers):
        return None
    cached, norms = cache.layers[layer.layer_idx], _norms(layer)
    if type(cached) is not StaticLayer or norms is None or "attention_mask" not in named:
        return None
    if not appends(cached, x, x) or x.dim() != 3 or grad_checks.in_transform():
        return None
    angles = position if isinstance(position, tuple) and len(position) == 2 else ()
    others = [tensor for tensor in (*angles, norms.query, norms.key) if tensor is not None]
    if not angles or any(one.dtype != x.dtype or one.device != x.device for one in others):
        return None
    turned = angles[0].shape[-1]
    forms = _forms.setdefault(layer, {})
    if turned not in forms:
        forms[turned] = next((gated for gated in (False, True) if _is(layer, own, turned, gated)), None)
    return forms[turned]


def _norms(layer: Any) -> Norms | None:
    """The norms of a layer's queries and keys, or none; None for some that the kernel does not have."""
    query, key = (layer._modules.get(name) for name in _NORMS)
    if query is None and key is None:
        return Norms(None, None, (0.0, False, True))
    for norm in (query, key):
        if not isinstance(norm, FusedNorm) or norm.weight.shape != (layer.head_dim,):
            return None
        if type(norm.weight) is not nn.Parameter:  # a DTensor, say
            return None
        if norm._forward_hooks or norm._forward_pre_hooks or has_own_forward(norm):
            return None
    return Norms(query.weight, key.weight, query.how) if query.how == key.how else None


class _Given(nn.Module):
    """Stands in for a projection: gives always the same, of the very input alone."""

    def __init__(self, x: torch.Tensor, result: torch.Tensor) -> None:
        super().__init__()
        self.given = x, result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result."""
        if x is not self.given[0]:
            raise ValueError("a projection of something else")
        return self.given[1]


@torch.no_grad()
def _is(layer: Any, own: Callable[..., Any], turned: int, gated: bool) -> bool:
    """Whether a layer's own forward gives what `attend` gives, tried on a CPU in bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").bfloat16()

    made = stand_in(layer)
    try:
        x = normal(_TRIED_BATCH, 1, 8)
        angles = normal(_TRIED_BATCH, 1, turned), normal(_TRIED_BATCH, 1, turned)
        mask = normal(_TRIED_BATCH, 1, 1, _TRIED_ROOM)
        projections = {
            name: _Given(x, normal(_TRIED_BATCH, 1, layer._modules[name].out_features))
            for name in _PROJECTIONS
        }
        made._modules = {**layer._modules, **projections, _OUT: nn.Identity()}
        for name in _NORMS:
            if (norm := layer._modules.get(name)) is not None:
                made._modules[name] = stand_in(norm)
                made._modules[name]._parameters = {"weight": nn.Parameter(normal(layer.head_dim), False)}
        made.layer_idx = 0
        heads = made.k_proj.given[1].shape[-1] // layer.head_dim
        before = [normal(_TRIED_BATCH, heads, _TRIED_LENGTH, layer.head_dim) for _ in range(2)]
        given: dict[str, Any] = {"position_embeddings": angles, "attention_mask": mask}
        want, its_cache = _of_cache(
            before, lambda cache: own(made, hidden_states=x, past_key_values=cache, **given)
        )
        have, cached = _of_cache(
            before, lambda cache: attend(made, x, cached=cache.layers[0], gated=gated, **given)
        )
        same = len(want) == len(have) and want[1] is have[1] and torch.equal(want[0], have[0])
        return same and all(map(torch.equal, its_cache, cached))
    except Exception:  # a class that wants something else stays as it is
        return False


def _of_cache(
    before: list[torch.Tensor], compute: Callable[[Any], Any]
) -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    """What is computed with a cache that holds some tokens, and its keys and values afterwards."""
    from transformers.cache_utils import Cache, StaticLayer

    cached = StaticLayer(_TRIED_ROOM)
    cached.update(*before)
    return compute(Cache(layers=[cached])), (cached.keys, cached.values)
