"""Caches that earlier calls of `generate` left, with the tokens that they hold.

A prompt gets the one that shares most of its beginning:
* If it begins with all tokens of the cache, it takes it.
* Else it is lent what it shares, and the cache stays for its own conversation; where a single one is kept and
  it shares most of that, it takes it, and what is behind is cut off. Caches that grow lend their tensors
  themselves, which every step replaces; of a cache of fixed size, which recorded steps write to, what is
  shared is copied into another one.
* Linear attention and sliding windows have no way back. Caches with such layers are taken as a whole or not
  at all.
At least one token is left to compute, whose logits are asked for.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

LEAST_SHARED = 16  # tokens; fewer are not worth another cache's place
# Classes of transformers, by name, since importing them takes a second.
_GROWS, _FIXED, _STATES = "DynamicLayer", "StaticLayer", "LinearAttentionLayer"
_LAYERS = {_GROWS, _FIXED, "DynamicSlidingWindowLayer"}


@dataclass(eq=False)
class Kept:
    """A cache, and what it is of.

    Attributes:
        tokens: int64 [n], on the CPU, whose keys and values, or states, it holds.
        rests_on: what it depends on beside them.
    """

    cache: Any
    tokens: torch.Tensor
    rests_on: Hashable

    def shared_with(self, prompt: torch.Tensor) -> int:
        """How many of a prompt's first tokens it holds."""
        most = min(len(self.tokens), len(prompt))
        unlike = (self.tokens[:most] != prompt[:most]).nonzero()
        return int(unlike[0]) if len(unlike) else most

    def usable_for(self, prompt: torch.Tensor, room: int | None) -> int:
        """How many of a prompt's first tokens a call can get of it; see `Conversations.find`."""
        its_room, shared = room_of(self.cache), self.shared_with(prompt)
        if (its_room is None) != (room is None):
            return 0
        whole = shared == len(self.tokens) and (room or 0) <= (its_room or 0)
        return shared if whole or can_be_cut(self.cache) else 0


@dataclass
class Found:
    """What a prompt begins with; the caller has it alone.

    Attributes:
        shared: tokens of the prompt.
        cache: that holds these; None if they are still to be copied into a new one.
        source: of which, then.
        stays: whether the source is to be kept, after that.
    """

    shared: int
    cache: Any = None
    source: Kept | None = None
    stays: bool = False


class Conversations:
    """The caches of a model's last calls.

    Args:
        most: that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Kept] = []  # the one used last at the end
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: torch.Tensor, room: int | None, rests_on: Hashable) -> Found | None:
        """What holds the beginning of a prompt, but not its last token; None if nothing does.

        Args:
            prompt: int64 [tokens], on the CPU.
            room: tokens that a cache of a fixed size must have room for; None for one that grows.
            rests_on: what the cache must rest on.
        """
        with self._lock:
            best, shared = self._best(prompt, room)
            if best is not None:
                self._drop_others(rests_on)
                best, shared = self._best(prompt, room)
            if best is None:
                del self._kept[: max(0, len(self._kept) + 1 - self._most)]
                return None
            fits = (room or 0) <= (room_of(best.cache) or 0)
            alone = self._most == 1 and 2 * shared >= len(best.tokens)
            taken = alone or shared == len(best.tokens)
            if not taken and len(self._kept) >= self._most > 1:
                self._kept.remove(next(kept for kept in self._kept if kept is not best))
            if not taken and not room:
                return Found(shared, lent(best.cache, shared))
            self._kept.remove(best)
        if taken and fits:
            cut(best.cache, len(best.tokens), shared)
            return Found(shared, best.cache)
        return Found(shared, None, best, not taken)

    def _best(self, prompt: torch.Tensor, room: int | None) -> tuple[Kept | None, int]:
        """What shares most, and how much that is; None where it is little."""
        may = [(kept, kept.usable_for(prompt[:-1], room)) for kept in self._kept]
        best, shared = max(may, key=lambda pair: pair[1], default=(None, 0))
        return (None, 0) if shared < LEAST_SHARED else (best, shared)

    def _drop_others(self, rests_on: Hashable) -> None:
        self._kept = [kept for kept in self._kept if kept.rests_on == rests_on]

    def tell(self, why: str) -> None:
        """Warn, once, of what is not kept."""
        if why not in self._told:
            self._told.add(why)
            warnings.warn(why, UserWarning, stacklevel=2)

    def make_room(self, tokens: int, free: int) -> None:
        """Forget those used longest ago until a new cache fits into memory, as far as that helps.

        Args:
            tokens: of the new one; each takes what one of theirs takes.
            free: bytes of memory.
        """
        with self._lock:
            while self._kept and tokens * _bytes_of_a_token(self._kept[0]) > free:
                free += bytes_of(self._kept.pop(0).cache)

    def forget(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()

    def keep(self, kept: Kept) -> None:
        """Keep a cache, and forget those that rest on something else, and those used longest ago."""
        with self._lock:
            self._drop_others(kept.rests_on)
            self._kept = [*self._kept, kept][-self._most :]


def length_of(cache: Any) -> int | None:
    """How many tokens a cache holds; None where that is not known, or not the same of all layers."""
    growing = [layer for layer in cache.layers if type(layer).__name__ != _STATES]
    if getattr(cache, "offloading", False) or not {type(one).__name__ for one in growing} <= _LAYERS:
        return None
    lengths = {int(layer.get_seq_length()) for layer in growing}
    return lengths.pop() if len(lengths) == 1 else None


def room_of(cache: Any) -> int | None:
    """For how many tokens a cache has room; None where it grows."""
    rooms = (layer.max_cache_len for layer in cache.layers if type(layer).__name__ == _FIXED)
    return min(rooms, default=None)


def bytes_of(cache: Any) -> int:
    """How much memory a cache's keys and values take."""
    held = (
        tensor for layer in cache.layers for tensor in (vars(layer).get("keys"), vars(layer).get("values"))
    )
    return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)


def _bytes_of_a_token(kept: Kept) -> float:
    return bytes_of(kept.cache) / (room_of(kept.cache) or len(kept.tokens))


def can_be_cut(cache: Any) -> bool:
    """Whether a cache can be as it was some tokens before."""
    return {type(layer).__name__ for layer in cache.layers} <= {_GROWS, _FIXED}


def has_states(cache: Any) -> bool:
    """Whether some of a cache's layers hold states, as of linear attention."""
    return any(type(layer).__name__ == _STATES for layer in cache.layers)


def cut(cache: Any, held: int, tokens: int) -> None:
    """Have a cache that holds some tokens, and can be cut or is to keep all, hold the first of them."""
    for layer in cache.layers if tokens < held else ():
        if type(layer).__name__ == _FIXED:
            layer.cumulative_length.fill_(tokens)
            continue
        _shorten(layer, tokens)
        if 2 * tokens < held:  # or what is behind would stay in memory
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def lent(cache: Any, tokens: int) -> Any:
    """Another cache that holds a growing one's first tokens, in the same memory until it grows."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in other.layers:
        _shorten(layer, tokens)
    return other


def _shorten(layer: Any, tokens: int) -> None:
    layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


def are_alike(cache: Any, other: Any) -> bool:
    """Whether two caches have layers of the same kinds, as a model's have until its config changes."""
    return [type(layer) for layer in cache.layers] == [type(layer) for layer in other.layers]


def copy_tokens(cache: Any, other: Any, tokens: int) -> None:
    """Have an empty cache of fixed size hold the first tokens of another one of the same model."""
    for layer, its in zip(cache.layers, other.layers, strict=True):
        if not its.is_initialized:
            its.lazy_initialization(layer.keys[:, :, :1], layer.values[:, :, :1])
        its.keys[:, :, :tokens].copy_(layer.keys[:, :, :tokens])
        its.values[:, :, :tokens].copy_(layer.values[:, :, :tokens])
        its.cumulative_length.fill_(tokens)
