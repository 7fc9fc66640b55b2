"""Inputs of prompts that are recorded, and caches that they write to."""

from __future__ import annotations

from typing import Any

import torch

from kbit.integrations.transformers.cache_argument import cache_in, without_cache
from kbit.integrations.transformers.left_padding import moved_left

# What a prompt's call may be given; all else is transformers' own affair.
KNOWN = {"attention_mask", "input_ids", "logits_to_keep", "position_ids", "use_cache"}
# Inputs of recordings: how many tokens of each sequence are there, and how many it had in front that are not.
COUNT, PADDING = "kbit_count", "kbit_padding"


class UnlikeOthersError(Exception):
    """Not all layers of a model did what they do in others, or it returns more."""


def is_absent(value: Any) -> bool:
    """Whether an argument says nothing: models that see are given an empty dict where there is no image."""
    return value is None or (isinstance(value, dict) and not value)


def held_by(cache: Any) -> int | None:
    """How many tokens a cache with layers of the two known kinds holds; None for others."""
    from transformers.cache_utils import LinearAttentionLayer, StaticLayer

    if any(type(layer) not in (StaticLayer, LinearAttentionLayer) for layer in cache.layers):
        return None
    growing = growing_layers(cache)
    if not growing:
        return None
    held = int(growing[0].get_seq_length())
    has_states = {bool(held)}
    for layer in cache.layers:
        has_states.update(getattr(layer, "has_previous_state", {}).values())
    return held if has_states == {bool(held)} else None


def growing_layers(cache: Any) -> list[Any]:
    """A cache's layers of keys and values."""
    return [layer for layer in cache.layers if hasattr(layer, "cumulative_length")]


def layers_of(cache: Any) -> tuple[int, int]:
    """How many of a cache's layers are of attention, and of linear attention."""
    growing = len(growing_layers(cache))
    return growing, len(cache.layers) - growing


def room_of(cache: Any) -> int:
    """For how many tokens a cache has room."""
    return min(layer.max_cache_len for layer in growing_layers(cache))


def prepared(
    model: Any, input_ids: torch.Tensor, named: dict[str, Any], **more: Any
) -> dict[str, Any] | None:
    """What `generate` would call a model with, without cache and mask; None if that is more than is known.

    Args:
        input_ids, named: as `generate` has them.
        more: see `prepare_inputs_for_generation`.
    """
    given = {**named, "attention_mask": None, **more}
    inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given)
    inputs = {name: value for name, value in inputs.items() if not is_absent(value)}
    inputs.pop("attention_mask", None)
    is_its = cache_in(inputs) is cache_in(named)
    inputs = without_cache(inputs)
    return inputs if is_its and inputs.keys() <= KNOWN else None


def padded(inputs: dict[str, Any], padding: torch.Tensor | None, length: int) -> dict[str, Any]:
    """Inputs of a prompt made so long, padded behind its tokens, with how many of these there are."""
    ids = inputs["input_ids"]
    (batch, tokens), kept = ids.shape, inputs.get("logits_to_keep") or 0
    at = torch.arange(length, device=ids.device)
    in_front = at.new_zeros(batch) if padding is None else padding.to(at.device)
    count = tokens - in_front
    padded = {**inputs, "input_ids": moved_left(ids, in_front, at % count[:, None]), COUNT: count}
    if "position_ids" in inputs:
        places = torch.minimum(at, count[:, None] - 1)
        padded["position_ids"] = moved_left(inputs["position_ids"], in_front, places)
    if padding is not None:
        padded[PADDING] = in_front
    padded.pop("logits_to_keep", None)
    if kept:
        padded["logits_to_keep"] = at[max(0, tokens - kept) : tokens].clone()
    return padded


def take_back(cache: Any, tokens: int) -> None:
    """Have a cache's length be what it was some tokens before."""
    if tokens:
        torch._foreach_sub_([layer.cumulative_length for layer in growing_layers(cache)], tokens)
