"""Prompts of `generate` from CUDA graphs, padded to few lengths.

Kernel by kernel the host takes longer for a prompt of a few hundred tokens than the GPU. A graph for each
number of tokens would be recorded again and again, so prompts are padded on the right:
* No token sees those behind it. Keys and values of the padding lie behind the cache's end, where the answer's
  own replace them; linear attention is told how many tokens there are (`padded_prompts`).
* Logits are taken at the last token that is there.
* The padding is the prompt's own beginning, which experts are loaded for anyway.

They begin in an empty cache, and so need no mask, whatever room the cache has, nor for padding on the left:
see `left_padding`. Others, and models in which attention goes other ways than `AttentionInterface`, run as
transformers has it.
Recorded or not, a prompt's kernels and so its logits are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.integrations.transformers.angles import fused_angles
from kbit.integrations.transformers.attention import SDPA, MaskWantedError, causal_without_masks
from kbit.integrations.transformers.late_masks import MASKS
from kbit.integrations.transformers.latent_prompts import fused_latent_prompts
from kbit.integrations.transformers.left_padding import (
    has_decoder,
    move_cache_right,
    moved_left,
    padding_in_front,
    states_moved_right,
)
from kbit.integrations.transformers.linear_attention import fused_linear_attention
from kbit.integrations.transformers.recordings import Record, Recordings
from kbit.integrations.transformers.static_caches import (
    fused_updates,
    recorded_length,
    why_not_recorded,
)
from kbit.nn.gated_delta import padded_prompts
from kbit.nn.rotary import fused_rotary, rotary_modules

_RUNS_BEFORE = 1
# What a prompt's call may be given; all else is transformers' own affair.
_KNOWN = {"attention_mask", "input_ids", "logits_to_keep", "past_key_values", "position_ids", "use_cache"}
# Inputs of recordings: how many tokens of each sequence are there, and how many it had in front that are not.
_COUNT, _PADDING = "kbit_count", "kbit_padding"


class Prompts:
    """Runs, records and replays prompts of a model.

    Args:
        model: gives it; not kept alive.
        record: see `Recordings`.
        refused: told why prompts cannot be recorded.
    """

    def __init__(self, model: Callable[[], Any], record: Record, refused: Callable[[str], None]) -> None:
        self._model = model
        self._recordings = Recordings(self._run, record, refused, _RUNS_BEFORE, may_leave=True)
        self._left_to_model = self._padding_left_to_model = False

    def clear(self) -> None:
        """Forget all recordings."""
        self._recordings.clear()
        self._left_to_model = self._padding_left_to_model = False

    def leave_to_model(self) -> None:
        """Have prompts run as the model runs them, until `clear`."""
        self._left_to_model = True

    def __call__(self, input_ids: torch.Tensor, named: dict[str, Any]) -> Any:
        """The model's output for a prompt, whose tokens its cache holds then; None: not one for graphs.

        Args:
            input_ids: [batch, tokens].
            named: what else `generate` has for the model.
        """
        model: Any = self._model()
        cache: Any = named.get("past_key_values")
        if self._left_to_model or not _may_take(model, input_ids, named):
            return None
        padding, mask = None, named.get("attention_mask")
        if mask is not None and not mask.all():
            padding = padding_in_front(mask.to(input_ids.device))
            known = named.get("position_ids") is not None and has_decoder(model)
            if padding is None or not known or self._padding_left_to_model:
                return None
        given = {**named, "attention_mask": None}
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **given)
        inputs = {name: value for name, value in inputs.items() if not _is_absent(value)}
        if inputs.pop("past_key_values", None) is not cache or inputs.keys() - _KNOWN:
            return None
        tokens, length = input_ids.shape[1], recorded_length(*input_ids.shape)
        if length is not None and length > _room(cache):
            length = None
        inputs = _padded(inputs, padding, length or tokens)
        try:
            if length is None:
                output = self._run(cache, inputs)
            else:
                output = self._recordings(cache, inputs, model.device)
        except (_Unlike, MaskWantedError):
            cache.reset()
            if padding is None:
                self._left_to_model = True
            self._padding_left_to_model = True
            return None
        _take_back(cache, inputs["input_ids"].shape[1] - tokens)
        if "logits_to_keep" not in inputs:
            output.logits = output.logits[:, :tokens]
        return output

    def _run(self, cache: Any, inputs: dict[str, Any]) -> Any:
        model, others = self._model(), dict(inputs)
        count, padding = others.pop(_COUNT), others.pop(_PADDING, None)
        with contextlib.ExitStack() as stack:
            causal = stack.enter_context(prompt_kernels(model))
            linear = stack.enter_context(padded_prompts(count))
            moved = None if padding is None else stack.enter_context(states_moved_right(model, padding))
            output = model(past_key_values=cache, return_dict=True, **others)
            if (causal(), linear()) != _layers(cache) or output.keys() - {"logits", "past_key_values"}:
                raise _Unlike
        if moved is not None:
            if moved.times != 1:
                raise _Unlike
            move_cache_right(_growing(cache), padding, others["input_ids"].shape[1])
        return output


class _Unlike(Exception):
    """Not all layers of a model did what they do in others, or it returns more."""


@contextlib.contextmanager
def prompt_kernels(model: Any) -> Iterator[Callable[[], int]]:
    """Few kernels instead of many, where they give what the model's own give, for prompts in empty caches.

    In the whole process meanwhile, and for other models as well, but attention.

    Yields:
        In how many layers' calls attention was causal without a mask.
    """
    with contextlib.ExitStack() as stack:
        causal = stack.enter_context(causal_without_masks())
        for each in (
            fused_angles(model),
            fused_rotary(rotary_modules(model)),
            fused_updates(whole=True),
            fused_linear_attention(),
            fused_latent_prompts(model),
        ):
            stack.enter_context(each)
        yield causal


def _may_take(model: Any, input_ids: Any, named: dict[str, Any]) -> bool:
    """Whether it is the whole prompt of a decoder, and so is what the cache will hold."""
    config, cache, mask = model.config, named.get("past_key_values"), named.get("attention_mask")
    if model.training or config.is_encoder_decoder:
        return False
    if config.get_text_config(decoder=True)._attn_implementation != SDPA:
        return False
    if hasattr(type(model), MASKS):  # of its own, which need not be causal
        return False
    if input_ids.dim() != 2 or input_ids.shape[1] < 2 or why_not_recorded(cache) is not None:
        return False
    if not all(_is_absent(value) for name, value in named.items() if name not in _KNOWN):
        return False
    if isinstance(named.get("logits_to_keep"), torch.Tensor) or not _is_empty(cache):
        return False
    return mask is None or mask.shape == input_ids.shape


def _is_absent(value: Any) -> bool:
    """Whether an argument says nothing: models that see are given an empty dict where there is no image."""
    return value is None or (isinstance(value, dict) and not value)


def _is_empty(cache: Any) -> bool:
    """Whether a cache holds nothing yet, in layers of the two known kinds."""
    from transformers.cache_utils import LinearAttentionLayer, StaticLayer

    if any(type(layer) not in (StaticLayer, LinearAttentionLayer) for layer in cache.layers):
        return False
    if any(any(getattr(layer, "has_previous_state", {}).values()) for layer in cache.layers):
        return False
    growing = _growing(cache)
    return bool(growing) and int(growing[0].get_seq_length()) == 0


def _growing(cache: Any) -> list[Any]:
    """A cache's layers of keys and values."""
    return [layer for layer in cache.layers if hasattr(layer, "cumulative_length")]


def _layers(cache: Any) -> tuple[int, int]:
    """How many of a cache's layers are of attention, and of linear attention."""
    growing = len(_growing(cache))
    return growing, len(cache.layers) - growing


def _room(cache: Any) -> int:
    return min(layer.max_cache_len for layer in _growing(cache))


def _padded(inputs: dict[str, Any], padding: torch.Tensor | None, length: int) -> dict[str, Any]:
    """Inputs of a prompt made so long, padded behind its tokens, with how many of these there are."""
    ids = inputs["input_ids"]
    (batch, tokens), kept = ids.shape, inputs.get("logits_to_keep") or 0
    at = torch.arange(length, device=ids.device)
    in_front = at.new_zeros(batch) if padding is None else padding.to(at.device)
    count = tokens - in_front
    padded = {**inputs, "input_ids": moved_left(ids, in_front, at % count[:, None]), _COUNT: count}
    if "position_ids" in inputs:
        places = torch.minimum(at, count[:, None] - 1)
        padded["position_ids"] = moved_left(inputs["position_ids"], in_front, places)
    if padding is not None:
        padded[_PADDING] = in_front
    padded.pop("logits_to_keep", None)
    if kept:
        padded["logits_to_keep"] = at[max(0, tokens - kept) : tokens].clone()
    return padded


def _take_back(cache: Any, tokens: int) -> None:
    """Have a cache's length be what it was some tokens before."""
    if tokens:
        torch._foreach_sub_([layer.cumulative_length for layer in _growing(cache)], tokens)
