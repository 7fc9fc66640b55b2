"""Rests of prompts, whose beginning a cache holds, from CUDA graphs: the next turn of a chat.

As prompts are (see `prompts`), they are padded behind to few lengths, and recorded. They run by the kernels
of steps. Behind many tokens attention gets no mask, and reads the cache's length; behind few it gets the
model's own, which the recording makes of that length, as it does in models that want more than causal
attention, and sees no more of the room that the cache has than `recorded_keys` of what it holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kbit.integrations.transformers.attention import MaskWantedError
from kbit.integrations.transformers.cache_argument import cache_in, with_cache, without_cache
from kbit.integrations.transformers.late_masks import LATE, with_masks
from kbit.integrations.transformers.prompt_inputs import (
    COUNT,
    UnlikeOthersError,
    growing_layers,
    layers_of,
    padded,
    prepared,
    room_of,
    take_back,
)
from kbit.integrations.transformers.recordings import Record, Recordings
from kbit.integrations.transformers.static_caches import recorded_keys, recorded_length
from kbit.integrations.transformers.step_kernels import rest_kernels
from kbit.nn.gated_delta import padded_prompts

_RUNS_BEFORE = 2  # there are more lengths than of prompts, as they are behind others
_KEYS = "kbit_keys"  # an input of recordings: of how many tokens attention sees keys; None: without a mask
_FEW_KEYS = 1024  # up to which attention with a mask is faster


class Rests:
    """Runs, records and replays rests of prompts of a model.

    Args:
        model: gives it; not kept alive.
        record: see `Recordings`.
        refused: told why they cannot be recorded.
    """

    def __init__(self, model: Callable[[], Any], record: Record, refused: Callable[[str], None]) -> None:
        self._model = model
        self._recordings = Recordings(self._run, record, refused, _RUNS_BEFORE)
        self._left_to_model = self._wants_masks = False

    def clear(self) -> None:
        """Forget all recordings."""
        self._recordings.clear()
        self._left_to_model = self._wants_masks = False

    def __call__(self, input_ids: torch.Tensor, named: dict[str, Any], held: int) -> Any:
        """The model's output for what a cache lacks of a prompt; None: not one for graphs.

        Args:
            input_ids: [batch, tokens], the whole prompt.
            named: what else `generate` has for the model.
            held: how many of the tokens the cache holds.
        """
        model: Any = self._model()
        cache, mask, (batch, tokens) = cache_in(named), named.get("attention_mask"), input_ids.shape
        rest = tokens - held
        length = recorded_length(batch, rest) if rest > 0 else None
        if self._left_to_model or length is None or held + length > room_of(cache):
            return None
        if (mask is not None and not mask.all()) or not _counts_up(named.get("position_ids"), tokens):
            return None
        inputs = prepared(model, input_ids, named, next_sequence_length=rest)
        if inputs is None:
            return None
        recorded = {**padded(inputs, None, length), LATE: None}
        try:
            output = self._behind(cache, recorded, held + length)
        except UnlikeOthersError:
            self._left_to_model = True
            return None
        take_back(cache, length - rest)
        if "logits_to_keep" not in recorded:
            output.logits = output.logits[:, :rest]
        return output

    def _behind(self, cache: Any, inputs: dict[str, Any], held: int) -> Any:
        """The output behind which a cache holds so many tokens."""
        model: Any = self._model()
        keys = min(room_of(cache), recorded_keys(held))
        if keys > _FEW_KEYS and not self._wants_masks:
            try:
                return self._recordings(cache, {**inputs, _KEYS: None}, model.device)
            except MaskWantedError:
                self._wants_masks = True
        return self._recordings(cache, {**inputs, _KEYS: keys}, model.device)

    def _run(self, cache: Any, inputs: dict[str, Any]) -> Any:
        model, others = self._model(), dict(inputs)
        keys, growing = others.pop(_KEYS), growing_layers(cache)
        changed = [*(layer.cumulative_length for layer in growing), *_states(cache)]
        before = [tensor.clone() for tensor in changed]
        lengths = {length.device: length for length in before[: len(growing)]}
        try:
            with (
                rest_kernels(model, lengths, keys) as unmasked,
                padded_prompts(others.pop(COUNT)) as linear,
            ):
                given = with_cache(cache, with_masks(model, cache, others))
                output = model(return_dict=True, **given)
                if unmasked is not None and unmasked() != len(growing):
                    raise MaskWantedError
                if linear() != layers_of(cache)[1] or without_cache(output).keys() - {"logits"}:
                    raise UnlikeOthersError
        except (MaskWantedError, UnlikeOthersError):
            torch._foreach_copy_(changed, before)
            raise
        return output


def _states(cache: Any) -> list[torch.Tensor]:
    """What a cache's layers of linear attention hold."""
    states = [
        (*vars(layer).get("conv_states", {}).values(), *vars(layer).get("recurrent_states", {}).values())
        for layer in cache.layers
    ]
    return [state for of_layer in states for state in of_layer if state is not None]


def _counts_up(positions: Any, tokens: int) -> bool:
    """Whether positions are those of a whole prompt without padding."""
    if not isinstance(positions, torch.Tensor) or positions.shape[-1] != tokens:
        return False
    return bool((positions == torch.arange(tokens, device=positions.device)).all())
