"""Caches of transformers that recorded steps write to: which can be, what is in them, and how keys and values
get there in one kernel, `kbit::cache_append`."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.integrations.transformers.cache_argument import cache_name
from kbit.integrations.transformers.kept_caches import room_of
from kbit.nn.standing_in import standing_in

MOST_TOKENS = 2048  # of recorded prompts, all sequences: beyond, the GPU takes longer than the host
_LEAST_PADDING, _LEAST_ROOM, _LEAST_MORE, _LEAST_KEYS = 16, 256, 512, 1024


def padded_length(tokens: int) -> int:
    """To how many tokens a prompt is padded: a multiple of 16 up to 128, then less than a quarter more."""
    return _rounded(tokens, _LEAST_PADDING, 4)


def roomy_length(tokens: int) -> int:
    """For how many tokens a cache is made that serves a longer conversation, too: half as many more, or 512.

    Another one would mean other recordings, and a copy of what it is to hold.
    """
    return _rounded(tokens + max(_LEAST_MORE, tokens // 2), _LEAST_ROOM, 4)


def recorded_keys(tokens: int) -> int:
    """For how many keys attention behind others is recorded: less than half more, as each is a recording."""
    return _rounded(tokens, _LEAST_KEYS, 2)


def _rounded(tokens: int, least: int, per_doubling: int) -> int:
    step = max(least, (1 << (tokens - 1).bit_length()) // (2 * per_doubling))
    return tokens + -tokens % step


def recorded_length(batch: int, tokens: int) -> int | None:
    """To how many tokens prompts are padded for a recording; None for so many that there is none."""
    length = padded_length(tokens)
    return length if batch * length <= MOST_TOKENS else None


def why_not_recorded(cache: Any) -> str | None:
    """Why steps with this cache of transformers cannot be recorded; None if they can."""
    if cache is None:
        return f"it has no {cache_name()}"
    if not getattr(cache, "is_compileable", False):
        return "its cache is not of a fixed size"
    if any(getattr(cache, "is_sliding", ())):
        return "its cache has a sliding window, which counts tokens in Python"
    if getattr(cache, "offloading", False):
        return "its cache is offloaded"
    return None


# Of caches, for how many tokens: to ask all layers at every step would take long.
_rooms: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def require_room(cache: Any, tokens: int) -> int:
    """Refuse to have a cache hold more tokens than it has room for: kernels would leave out what is beyond.

    How many it holds, a tensor of its own says, for which the host would have to wait; so callers tell.

    Args:
        cache: of transformers, or None.
        tokens: that it is to hold.

    Returns:
        For how many it has room; `sys.maxsize` where it grows.

    Raises:
        ValueError: for fewer.
    """
    layers = getattr(cache, "layers", None)
    if layers is None:
        return sys.maxsize
    room = _rooms.get(cache, -1)
    if tokens > room:  # not known yet, or its layers are others now
        found = room_of(cache)
        room = _rooms[cache] = sys.maxsize if found is None else found
    if tokens > room:
        raise ValueError(
            f"generate: {tokens} tokens are to be in a cache that has room for {room}, {cache_name()}. "
            f"Give one with max_cache_len={tokens} or more, or ask for fewer by max_new_tokens. With "
            f"cache_implementation='static' generate makes one that is large enough."
        )
    return room


class _Late(threading.local):
    """Of a step or a prompt of this thread.

    Attributes:
        layers: by how many tokens layers of caches are still to grow; None outside.
        whole: whether what layers take is all that they hold.
        keys: of how many tokens attention is given keys; None for all that there is room for.
    """

    layers: dict[Any, int] | None = None
    whole = False
    keys: int | None = None


_late = _Late()


@contextlib.contextmanager
def fused_updates(*, whole: bool = False, keys: int | None = None) -> Iterator[None]:
    """Layers of static caches take keys and values in one kernel, where they took four.

    Their lengths grow in one for all layers, at the end, or when one is asked for.

    Args:
        whole: what layers take is all that they hold, and given back as it is, without the room behind it.
        keys: more than layers will hold, given back without the room behind them, of which masks are, too.
    """
    from transformers.cache_utils import StaticLayer

    ours = {"update": _fused, "get_seq_length": _settled, "get_mask_sizes": _shortened}
    with contextlib.ExitStack() as stack:
        for name, make in ours.items():
            stack.enter_context(standing_in(StaticLayer, name, make))
        stack.enter_context(_growing_together(whole, keys))
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def update(layer: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        if not _is_ours(layer):
            return own(layer, key, value, *more, **named)
        settle(layer)
        if appends(layer, key, value):
            torch.ops.kbit.cache_append(layer.keys, layer.values, key, value, layer.cumulative_length)
            grow(layer, key.shape[2])
            held = layer.keys, layer.values
        else:
            held = own(layer, key, value, *more, **named)
        if _late.whole:
            return key, value
        return held if _late.keys is None else tuple(each[:, :, : _late.keys] for each in held)

    return update


def _settled(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get_seq_length(layer: Any, *given: Any, **named: Any) -> Any:
        if not torch.compiler.is_compiling():
            settle(layer)
        return own(layer, *given, **named)

    return get_seq_length


def _shortened(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def get_mask_sizes(layer: Any, *given: Any, **named: Any) -> Any:
        keys, offset = own(layer, *given, **named)
        seen = _late.keys if _is_ours(layer) else None
        return (keys if seen is None else min(keys, seen)), offset

    return get_mask_sizes


def _is_ours(layer: Any) -> bool:
    from transformers.cache_utils import StaticLayer

    return type(layer) is StaticLayer and not torch.compiler.is_compiling()


@contextlib.contextmanager
def _growing_together(whole: bool, keys: int | None) -> Iterator[None]:
    before = _late.layers, _late.whole, _late.keys
    _late.layers, _late.whole, _late.keys = {}, whole, keys
    try:
        yield
        _settle_all()
    finally:
        _late.layers, _late.whole, _late.keys = before


def grow(layer: Any, tokens: int) -> None:
    """A cache's layer has so many tokens more: with the others of a step, where one runs, else at once."""
    if _late.layers is None:
        layer.cumulative_length.add_(tokens)
    else:
        _late.layers[layer] = tokens


def settle(layer: Any) -> None:
    """Have a layer's length be what was appended."""
    if layer in (_late.layers or ()):
        _settle_all()


def _settle_all() -> None:
    waiting = _late.layers or {}
    for tokens in set(waiting.values()):
        lengths = [layer.cumulative_length for layer, count in waiting.items() if count == tokens]
        torch._foreach_add_(lengths, tokens)
    waiting.clear()


def appends(layer: Any, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a cache's layer has tensors of the GPU for `kbit::cache_append`."""
    if not layer.is_initialized or not key.is_cuda:
        return False
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return False
    length = layer.cumulative_length
    plain = all(type(tensor) is torch.Tensor for tensor in (layer.keys, layer.values, key, value))
    alike = layer.keys.dtype == layer.values.dtype == key.dtype == value.dtype
    return plain and alike and isinstance(length, torch.Tensor) and length.dtype == torch.int64


def states_of(cache: Any) -> list[dict[str, Any]]:
    """The attributes of a cache's layers."""
    return [vars(layer) for layer in getattr(cache, "layers", ())]


def copied(value: Any) -> Any:
    """A copy of dicts and lists in each other, with the same tensors in it."""
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return [copied(item) for item in value] if isinstance(value, list) else value


def put_back(container: dict[Any, Any], copy: dict[Any, Any]) -> None:
    """Have a dict, and the dicts in it, hold what was `copied`; the dicts themselves stay."""
    for key in container.keys() - copy.keys():
        del container[key]
    for key, value in copy.items():
        if isinstance(value, dict) and isinstance(container.get(key), dict):
            put_back(container[key], value)
        elif key not in container or not is_same(container[key], value):
            container[key] = copied(value)


def is_same(value: Any, copy: Any) -> bool:
    """Whether a value is as it was copied: the same tensors, and everything else equal."""
    if isinstance(value, dict):
        return value.keys() == copy.keys() and all(is_same(item, copy[key]) for key, item in value.items())
    if isinstance(value, list):
        return len(value) == len(copy) and all(map(is_same, value, copy))
    return value is copy or (not isinstance(value, torch.Tensor) and bool(value == copy))


def tensors_of(cache: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """The tensors of a cache's layers, and where each is to be found."""
    containers: list[Any] = states_of(cache)
    while containers:
        container = containers.pop()
        for key, value in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(value, torch.Tensor):
                yield container, key, value
            elif isinstance(value, (dict, list)):
                containers.append(value)
