"""Residual connections of a decoder: each sum and the norm behind it are one kernel, `kbit::add_rms_norm`.

A layer of most families is `x + mixer(norm(x))` and then `x + mlp(norm(x))`, so every sum is followed by a
norm, the last one by that of the layer behind. Where norms run by our kernel, a sum of its own costs decoding
as much as the norm does. Whether a layer's class is such a layer is tried with stand-ins for its parts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kbit.nn.attention_layers import FORMER_CACHE, FORMER_STATES
from kbit.nn.mixins import MixedIn, attributes, mix_in, mixed, stand_in
from kbit.nn.norm import FusedNorm
from kbit.nn.shared_expert import router_of
from kbit.nn.standing_in import trial
from kbit.nn.support import has_own_forward, is_apart

_NORMS, _MLP = ("input_layernorm", "post_attention_layernorm"), "mlp"
Add = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x and what is added to it, to the sum
_FOLLOWING = "_kbit_following"  # of a layer: the norm behind its last sum, in a tuple, or it were a submodule


class FusedResiduals(MixedIn):
    """What a decoder layer's class is mixed with. Subclasses say how the layer calls its mixer.

    The class keeps its name, by which placement over devices knows layers that are not to be split.
    """

    prefix = ""

    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    mlp: nn.Module

    def forward(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> Any:
        """As its own class, and by that class's forward where the norms go by that of theirs."""
        own: Any = self.own
        norm = self.post_attention_layernorm
        renamed = FORMER_CACHE in named and FORMER_CACHE not in _defaults(own)
        if more or renamed or not (isinstance(norm, FusedNorm) and norm.takes(hidden_states)):
            return super().forward(hidden_states, *more, **named)
        add, router = norm.add, router_of(self.mlp)
        if router is not None:
            add = functools.partial(add, add_rms_norm=functools.partial(router[0].add_rms_norm, router[1]))
        return self.run(hidden_states, named, add, self._add_last)

    def run(self, x: torch.Tensor, named: dict[str, Any], add: Add, add_last: Add) -> torch.Tensor:
        """What the class computes, by functions that make its two sums."""
        own: Any = self.own
        x = add(x, self.mix(self.input_layernorm(x), _defaults(own) | named))
        more = self.mlp(self.post_attention_layernorm(x))
        more = more[0] if isinstance(more, tuple) else more  # experts may return their routers' logits, too
        return add_last(x, more)

    def mix(self, x: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        """Attention, or what is in its place, of normed x and of what else the layer was given."""
        raise NotImplementedError

    def leave(self) -> None:
        """Forget the norm behind."""
        vars(self).pop(_FOLLOWING, None)

    def _add_last(self, x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        (norm,) = vars(self).get(_FOLLOWING, (None,))
        if isinstance(norm, FusedNorm) and not is_apart(self):  # who listens may write to the sum
            return norm.add(x, more)
        return x + more


class _Attention(FusedResiduals):
    self_attn: nn.Module

    def mix(self, x: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        mixed: torch.Tensor = self.self_attn(hidden_states=x, **named)[0]
        return mixed


class _LinearAttention(FusedResiduals):
    linear_attn: nn.Module

    def mix(self, x: torch.Tensor, named: dict[str, Any]) -> torch.Tensor:
        rest = {
            name: value
            for name, value in named.items()
            if name not in ("position_embeddings", "position_ids")
        }
        if FORMER_CACHE in rest:
            rest[FORMER_STATES] = rest.pop(FORMER_CACHE)
        mixed: torch.Tensor = self.linear_attn(hidden_states=x, **rest)
        return mixed


@functools.cache
def _defaults(own: type[nn.Module]) -> dict[str, Any]:
    """What a class's forward takes for what it is not given."""
    parameters = inspect.signature(own.forward).parameters
    return {name: each.default for name, each in parameters.items() if each.default is not each.empty}


# By the name of the mixer.
_KINDS: dict[str, type[FusedResiduals]] = {"self_attn": _Attention, "linear_attn": _LinearAttention}


def fuse_residuals(model: nn.Module) -> None:
    """Have the sums of decoder layers made by the norms behind them, in place, where this gives the same."""
    tried: dict[Any, bool | None] = {}
    for parent in model.modules():
        for layers in (child for child in parent.children() if isinstance(child, nn.ModuleList)):
            fused = [layer if _fuse(layer, tried) else None for layer in layers]
            behind = [*list(layers)[1:], parent] if len(layers) else []  # a slice would make one of its class
            for layer, following in zip(fused, behind, strict=True):
                norm = getattr(following, "norm" if following is parent else _NORMS[0], None)
                if layer is not None and isinstance(norm, FusedNorm):
                    vars(layer)[_FOLLOWING] = (norm,)


def _fuse(layer: nn.Module, tried: dict[Any, bool | None]) -> bool:
    """Whether a layer is such a layer, which it then is mixed with."""
    if isinstance(layer, MixedIn) or has_own_forward(layer):
        return isinstance(layer, FusedResiduals)
    for mixer, kind in _KINDS.items():
        if set(layer._modules) != {*_NORMS, mixer, _MLP} or not all(
            isinstance(layer._modules[name], FusedNorm) for name in _NORMS
        ):
            continue
        key = (type(layer), kind, attributes(layer))
        if key not in tried:
            tried[key] = _computes(layer, kind, mixer)
        if tried[key]:
            mix_in(layer, kind)
            return True
    return False


class _Part(nn.Module):
    """Stands in for a part of a layer, and remembers what it was called with."""

    def __init__(self, compute: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.compute, self.calls = compute, list[Any]()

    def forward(self, *given: Any, **named: Any) -> Any:
        """Of its one input, or of hidden_states."""
        x = given[0] if given else named.pop("hidden_states")
        self.calls.append((len(given), {name: id(value) for name, value in named.items()}))
        return self.compute(x)


def _parts(mixer: str) -> dict[str, _Part]:
    mixed = (lambda x: (x.exp(), None)) if mixer == "self_attn" else torch.exp
    functions = {_NORMS[0]: torch.sin, _NORMS[1]: torch.cos, mixer: mixed, _MLP: torch.square}
    return {name: _Part(function) for name, function in functions.items()}


@trial
def _computes(layer: nn.Module, kind: type[FusedResiduals], mixer: str) -> bool:
    """Whether a layer's class, with its attributes, calls its parts and adds up as a kind does."""
    parameters = inspect.signature(type(layer).forward).parameters.values()
    named = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD][2:]
    needed = {each.name: object() for each in named if each.default is each.empty}
    given = {each.name: object() for each in named}
    more = {"something": object()} if any(each.kind is each.VAR_KEYWORD for each in parameters) else {}
    tries = itertools.product((needed, given, given | more), (False, True))
    with torch.random.fork_rng(devices=[]):  # dropout would draw from others' numbers
        return all(_agree(layer, kind, mixer, one, training) for one, training in tries)


def _agree(
    layer: nn.Module, kind: type[FusedResiduals], mixer: str, given: dict[str, Any], training: bool
) -> bool:
    """Whether both do the same with what a model hands its layers; in training, too, for dropout's sake."""
    own, made = type(layer), stand_in(layer)
    made.training = training
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), device="cpu", dtype=torch.float32)
    wanted, had = _parts(mixer), _parts(mixer)
    made._modules = dict(wanted)
    want = own.forward(made, x, **given)
    made._modules = dict(had)
    made.__class__ = mixed(own, kind)
    have = made.run(x, given, torch.add, torch.add)
    return torch.equal(want, have) and all(wanted[name].calls == had[name].calls for name in had)
