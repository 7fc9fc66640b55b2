"""Prompts of several lengths in one batch, which `generate` has padded on the left.

Attention needs a mask for such padding, for which PyTorch has no fast kernel, and a mask is made by many
small ones. So sequences are moved to the left, in front of their padding, where no token sees it. What the
model makes of them is moved back: hidden states before the head takes the last ones of all sequences, keys
and values behind the last layer. How far is an input on the device, so one recording serves all paddings.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def padding_in_front(mask: torch.Tensor) -> torch.Tensor | None:
    """How many tokens of padding are in front of each sequence.

    Args:
        mask: [batch, tokens], 0 where there is padding. Waits for its device.

    Returns:
        int64 [batch]; None where padding is elsewhere, too, or there is nothing else.
    """
    there, tokens = mask != 0, mask.shape[1]
    padding = tokens - there.sum(1)
    behind = torch.arange(tokens, device=mask.device) >= padding[:, None]
    is_so = (there == behind).all() & (padding < tokens).all()
    return padding if bool(is_so) else None


def moved_left(tensor: torch.Tensor, padding: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """What is at some places of sequences, counted from their first tokens.

    Args:
        tensor: [..., batch, tokens].
        padding: of `padding_in_front`.
        places: int64 [batch, places].
    """
    at = padding[:, None] + places
    return torch.take_along_dim(tensor, at.view((1,) * (tensor.dim() - 2) + at.shape), -1)


def moved_right(tensor: torch.Tensor, padding: torch.Tensor, dim: int) -> torch.Tensor:
    """Sequences behind their padding again, where what was behind them comes.

    Args:
        tensor: [batch, ...].
        padding: of `padding_in_front`.
        dim: that of tokens.
    """
    tokens = tensor.shape[dim]
    places = (torch.arange(tokens, device=tensor.device) - padding[:, None]) % tokens
    shape = [len(padding)] + [1] * (tensor.dim() - 1)
    shape[dim] = tokens
    return torch.take_along_dim(tensor, places.view(shape), dim)


class MoveRight:
    """A hook of what makes hidden states: in its thread they are `moved_right`.

    Attributes:
        times: how often they were.
    """

    def __init__(self, padding: torch.Tensor) -> None:
        self._padding, self._thread = padding, threading.get_ident()
        self.times = 0

    def __call__(self, module: Any, given: Any, output: Any) -> None:
        """As a forward hook."""
        states = getattr(output, "last_hidden_state", None)
        if states is not None and threading.get_ident() == self._thread:
            output.last_hidden_state = moved_right(states, self._padding, 1)
            self.times += 1


@contextlib.contextmanager
def states_moved_right(model: Any, padding: torch.Tensor) -> Iterator[MoveRight]:
    """A model's head gets hidden states that are `moved_right`, in this thread.

    Args:
        model: of transformers, with a head on a decoder (`has_decoder`).
        padding: of `padding_in_front`.
    """
    hook = MoveRight(padding)
    handle = model.base_model.register_forward_hook(hook)
    try:
        yield hook
    finally:
        handle.remove()


def has_decoder(model: Any) -> bool:
    """Whether a model is a head on what makes hidden states."""
    return model.base_model is not model


def move_cache_right(layers: Iterable[Any], padding: torch.Tensor, tokens: int) -> None:
    """Have keys and values of a cache's first tokens `moved_right`, in place.

    Args:
        layers: of the cache, with keys and values [batch, heads, room, columns].
        padding: of `padding_in_front`.
        tokens: how many.
    """
    for layer in layers:
        for held in (layer.keys[:, :, :tokens], layer.values[:, :, :tokens]):
            held.copy_(moved_right(held, padding, 2))
