"""Caches of fixed sizes that `generate` is given again, with what was recorded with them."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from kbit.format.autocast import autocast_dtype
from kbit.integrations.transformers.static_caches import recorded_length
from kbit.integrations.transformers.stop_checks import check_late

LONGEST = "_previous_max_cache_length"  # of a model: transformers makes its caches as long as that


class LastCaches:
    """Gives `generate(cache_implementation="static")` its cache."""

    name = "_prepare_static_cache"

    def __init__(self) -> None:
        self.__name__ = self.name
        self._last: weakref.WeakKeyDictionary[Any, list[_Last]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def __call__(self, model: Any, *arguments: Any, **named: Any) -> Any:
        """What the model's own method would give, or an earlier cache, emptied; see `check_late`."""
        cache = self._cache(model, *arguments, **named)
        check_late(cache)
        return cache

    def forget(self, model: Any) -> None:
        """Let go of a model's caches."""
        with self._lock:
            self._last.pop(model, None)

    def _cache(self, model: Any, *arguments: Any, **named: Any) -> Any:
        if "prefill_chunk_size" in named:  # for which the cache would allocate at once
            named["prefill_chunk_size"] = None
        named |= _room_for_padding(named)
        fresh = type(model)._prepare_static_cache(model, *arguments, **named)
        layers, batch = _layers(fresh), named.get("batch_size")
        if layers is None or batch is None:
            return fresh
        offloading = getattr(fresh, "offloading", False)
        narrow = autocast_dtype(model.device)  # which keys then have
        kind = layers, batch, model.dtype, model.device, offloading, torch.is_inference_mode_enabled(), narrow
        with self._lock:  # or two threads would be given one
            held = [one for one in self._last.get(model, ()) if one.is_held]
            free = [one for one in self._last.get(model, ()) if one not in held and one.kind == kind]
            chosen = free[-1] if free else _Last(kind, fresh)
            self._last[model] = [*held, chosen]
            last = chosen.cache
        if free:
            _empty(last)
        return last


@dataclass(eq=False)
class _Last:
    """A cache that was given to `generate`.

    Attributes:
        kind: what a call must want to be given it again.
    """

    kind: Any
    cache: Any

    @property
    def is_held(self) -> bool:
        """Whether somebody else has it: a call that runs, or who it was returned to."""
        return sys.getrefcount(self.cache) > _REFERENCES


_REFERENCES = next(sys.getrefcount(one.cache) for one in [_Last(None, object())])  # to what nobody else has


def _empty(cache: Any) -> None:
    """`cache.reset()`; tensors of all layers in a launch, where that has three for each layer."""
    from transformers.cache_utils import StaticLayer

    whole = [layer for layer in cache.layers if type(layer) is StaticLayer and layer.is_initialized]
    for layer in cache.layers:
        if layer not in whole:
            layer.reset()
    for names in (("keys", "values"), ("cumulative_length",)):
        tensors = [getattr(layer, name) for layer in whole for name in names]
        if tensors:
            torch._foreach_zero_(tensors)


def _room_for_padding(named: dict[str, Any]) -> dict[str, int]:
    """The length of a cache that a prompt fits into when it is padded; none where it does anyhow."""
    asked, batch, more = (named.get(name) for name in ("max_cache_len", "batch_size", "model_kwargs"))
    of_tokens = ((more or {}).get(name) for name in ("attention_mask", "position_ids"))
    tokens = next((one.shape[-1] for one in of_tokens if isinstance(one, torch.Tensor)), 0)
    if asked is None or batch is None or not tokens:
        return {}
    length = recorded_length(batch, tokens)
    return {} if length is None or length <= asked else {"max_cache_len": length}


def _layers(cache: Any) -> tuple[Any, ...] | None:
    """Kinds and lengths of a cache's layers; None for caches of other kinds."""
    layers = getattr(cache, "layers", None)
    return layers and tuple((type(layer), getattr(layer, "max_cache_len", None)) for layer in layers)
