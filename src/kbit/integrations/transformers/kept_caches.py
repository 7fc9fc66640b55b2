"""Caches that earlier calls of `generate` left, with the tokens that they hold.

A prompt takes the one that shares most of its beginning:
* A cache that grows: its tensors are replaced at every step, so what is shared is lent, and the cache stays.
  Where at least half of it is shared, it is taken instead: the rest will hardly be asked for again.
* A cache of a fixed size, which recorded steps write to, is taken if at least half of it is shared.
* Linear attention and sliding windows have no way back. Caches with such layers are taken by prompts that
  begin with all that they hold.
At least one token is left to compute, whose logits are asked for.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Hashable
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

    def is_mostly(self, shared: int) -> bool:
        """Whether so many tokens are at least half of it."""
        return 2 * shared >= len(self.tokens)


class Conversations:
    """The caches of a model's last calls.

    Args:
        most: that are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[Kept] = []  # the one used last at the end
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def take(self, prompt: torch.Tensor, room: int | None, rests_on: Callable[[], Hashable]) -> Any:
        """A cache that holds the beginning of a prompt, but not its last token; None if there is no such.

        The caller has it alone. If there is none, one less than may be kept are, so that there is a place.

        Args:
            prompt: int64 [tokens], on the CPU.
            room: tokens that one of a fixed size must have room for; None for one that grows.
            rests_on: tells what the cache must rest on; asked where one would do else.
        """
        with self._lock:
            best, shared = self._best(prompt, room)
            if best is not None:
                rests = rests_on()
                self._kept = [kept for kept in self._kept if kept.rests_on == rests]
                best, shared = self._best(prompt, room)
            if best is None:
                del self._kept[: len(self._kept) + 1 - self._most]
                return None
            if not best.is_mostly(shared):
                return lent(best.cache, shared)
            self._kept.remove(best)
        cut(best.cache, shared)
        return best.cache

    def _best(self, prompt: torch.Tensor, room: int | None) -> tuple[Kept | None, int]:
        """What shares most, and how much that is; None where it is little."""
        may = [(kept, _shared(kept, prompt[:-1], room)) for kept in self._kept]
        best, shared = max(may, key=lambda pair: pair[1], default=(None, 0))
        return (None, 0) if shared < LEAST_SHARED else (best, shared)

    def make_room(self, tokens: int, free: int) -> None:
        """Forget those used longest ago until a new cache fits into memory, as far as that helps.

        Args:
            tokens: of the new one; each takes what one of theirs takes.
            free: bytes of memory.
        """
        with self._lock:
            while self._kept and tokens * bytes_of(self._kept[0].cache) > free * len(self._kept[0].tokens):
                free += bytes_of(self._kept.pop(0).cache)

    def forget(self) -> None:
        """Forget all."""
        with self._lock:
            self._kept.clear()

    def keep(self, kept: Kept) -> None:
        """Keep a cache, and forget those used longest ago."""
        with self._lock:
            self._kept = [*self._kept, kept][-self._most :]


def _shared(kept: Kept, prompt: torch.Tensor, room: int | None) -> int:
    """How many of a prompt's tokens a cache can begin with."""
    its_room, shared = room_of(kept.cache), kept.shared_with(prompt)
    if (its_room is None) != (room is None) or (room or 0) > (its_room or 0):
        return 0
    if not can_be_cut(kept.cache):
        return shared if shared == len(kept.tokens) else 0
    return shared if room is None or kept.is_mostly(shared) else 0


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
    return sum(tensor.nbytes for tensor in held if tensor is not None)


def can_be_cut(cache: Any) -> bool:
    """Whether a cache can be as it was some tokens before."""
    return {type(layer).__name__ for layer in cache.layers} <= {_GROWS, _FIXED}


def cut(cache: Any, tokens: int) -> None:
    """Have a cache hold its first tokens alone, which it can, or all that it holds."""
    if length_of(cache) == tokens:
        return
    for layer in cache.layers:
        if type(layer).__name__ == _FIXED:
            layer.cumulative_length.fill_(tokens)
        else:
            layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


def lent(cache: Any, tokens: int) -> Any:
    """Another cache that holds a growing one's first tokens, in the same memory until it grows."""
    other = copy.copy(cache)
    other.layers = [copy.copy(layer) for layer in cache.layers]
    cut(other, tokens)
    return other
