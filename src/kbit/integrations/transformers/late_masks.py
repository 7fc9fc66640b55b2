"""Masks of attention that recorded steps, and rests of prompts, make themselves.

`generate` makes the masks of each step, two dozen operators, in front of it. A step of one token can as well
make them itself: then they are part of the graph, and cost no launches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from kbit.integrations.transformers.attention import SDPA
from kbit.integrations.transformers.cache_argument import with_cache

MASKS = "create_masks_for_generate"  # of a model: what makes masks for its `generate`
LATE = "kbit_mask_of_tokens"  # an input of steps and of rests of prompts, in place of attention_mask
# Arguments that say more about the tokens than a mask does; few models have them.
_MORE = ("block_sequence_ids", "token_type_ids", "mm_token_type_ids")


def late_masks(model: Any) -> dict[str, Any]:
    """The attribute by which a model leaves masks to its steps; none for models with masks of their own."""
    return {} if hasattr(type(model), MASKS) else {MASKS: _LateMasks()}


class _LateMasks:
    """Stands in for transformers' function, and leaves steps of one token the mask of tokens that it got."""

    def __init__(self) -> None:
        self._left: Callable[[], torch.Tensor | None] | None = None

    def __reduce__(self) -> Any:  # copies of a model, and saved ones, get transformers'
        return _transformers_own, ()

    def __call__(self, **named: Any) -> Any:
        self._left = None
        mask, more = named["attention_mask"], any(named.get(name) is not None for name in _MORE)
        prompt = named["inputs_embeds"].shape[1] != 1 or named.get("is_first_iteration")
        if prompt or more or named["config"]._attn_implementation != SDPA:
            return _made(**named)
        self._left = (lambda: None) if mask is None else weakref.ref(mask)
        return mask

    def left(self, mask: torch.Tensor | None) -> bool:
        """Whether a step's mask is the one that was left to it, maybe moved to the model's device."""
        if self._left is None:
            return False
        left = self._left()
        if left is None or mask is None or left.device == mask.device:
            return left is mask
        return (left.shape, left.dtype) == (mask.shape, mask.dtype)


def with_late_mask(model: Any, cache: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a step; a mask that was left to it is extended to all that its cache has room for.

    Args:
        model: with what `late_masks` says, or without.
        cache: the step's.
        inputs: with a mask of tokens, [batch, tokens so far], if it was left, else with what steps take.
    """
    masks, mask = vars(model).get(MASKS), inputs.get("attention_mask")
    if not isinstance(masks, _LateMasks) or not masks.left(mask):
        return inputs
    if mask is not None:
        lengths = (getattr(layer, "max_cache_len", 0) for layer in getattr(cache, "layers", ()))
        mask = torch.nn.functional.pad(mask, (0, max(0, max(lengths, default=0) - mask.shape[1])))
    return {LATE: mask} | {name: value for name, value in inputs.items() if name != "attention_mask"}


def with_masks(model: Any, cache: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """What the model takes in place of inputs of `with_late_mask`: the masks that `generate` would make."""
    if LATE not in inputs:
        return inputs
    others = {name: value for name, value in inputs.items() if name != LATE}
    tokens = next(inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None)
    masks = _made(
        config=model.config,
        inputs_embeds=torch.empty((*tokens.shape[:2], 0), dtype=model.dtype, device=tokens.device),
        attention_mask=inputs[LATE],
        position_ids=inputs.get("position_ids"),
        **with_cache(cache),
    )
    return {**others, "attention_mask": masks}


def _made(**named: Any) -> Any:
    return _transformers_own()(**named)


def _transformers_own() -> Callable[..., Any]:
    from transformers.masking_utils import create_masks_for_generate

    return create_masks_for_generate
