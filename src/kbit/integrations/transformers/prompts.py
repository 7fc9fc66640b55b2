"""Prompts of `generate` from CUDA graphs, padded to few lengths.

Kernel by kernel the host takes longer for a prompt of a few hundred tokens than the GPU. A graph for each
number of tokens would be recorded again and again, so prompts are padded on the right:
* No token sees those behind it. Keys and values of the padding lie behind the cache's end, where the answer's
  own replace them; linear attention is told how many tokens there are (`padded_prompts`).
* Logits are taken at the last token that is there.
* The padding is the prompt's own beginning, which experts are loaded for anyway.

Those that begin in an empty cache need no mask, whatever room the cache has, nor for padding on the left: see
`left_padding`. For those whose beginning the cache holds there are `prompt_rests`. Others, and models whose
attention goes other ways than `AttentionInterface`, run as transformers has it.
Recorded or not, a prompt's kernels and so its logits are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.integrations.transformers.angles import fused_angles
from kbit.integrations.transformers.attention import SDPA, MaskWantedError, causal_without_masks
from kbit.integrations.transformers.cache_argument import cache_in, with_cache, without_cache
from kbit.integrations.transformers.late_masks import MASKS
from kbit.integrations.transformers.latent_prompts import fused_latent_prompts
from kbit.integrations.transformers.left_padding import (
    has_decoder,
    move_cache_right,
    padding_in_front,
    states_moved_right,
)
from kbit.integrations.transformers.linear_attention import fused_linear_attention
from kbit.integrations.transformers.prompt_inputs import (
    COUNT,
    KNOWN,
    PADDING,
    UnlikeOthersError,
    growing_layers,
    held_by,
    is_absent,
    layers_of,
    padded,
    prepared,
    room_of,
    take_back,
)
from kbit.integrations.transformers.prompt_rests import Rests
from kbit.integrations.transformers.recordings import Record, Recordings
from kbit.integrations.transformers.static_caches import (
    fused_updates,
    recorded_length,
    require_room,
    why_not_recorded,
)
from kbit.nn.gated_delta import padded_prompts
from kbit.nn.rotary import fused_rotary, rotary_modules

_RUNS_BEFORE = 1


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
        self._rests = Rests(self._model, record, refused)
        self._left_to_model = self._padding_left_to_model = False

    def clear(self) -> None:
        """Forget all recordings."""
        self._recordings.clear()
        self._rests.clear()
        self._left_to_model = self._padding_left_to_model = False

    def leave_to_model(self) -> None:
        """Have prompts run as the model runs them, until `clear`."""
        self._left_to_model = True

    def __call__(self, input_ids: torch.Tensor, named: dict[str, Any]) -> Any:
        """The model's output for a prompt, whose tokens its cache holds then; None: not one for graphs.

        Args:
            input_ids: [batch, tokens].
            named: what else `generate` has for the model.

        Raises:
            ValueError: the cache has no room for it.
        """
        model: Any = self._model()
        cache: Any = cache_in(named)
        if self._left_to_model or not _may_take(model, input_ids, named):
            return None
        require_room(cache, input_ids.shape[1])
        if held := held_by(cache):
            return self._rests(input_ids, named, held)
        padding, mask = None, named.get("attention_mask")
        if mask is not None and not mask.all():
            padding = padding_in_front(mask.to(input_ids.device))
            known = named.get("position_ids") is not None and has_decoder(model)
            if padding is None or not known or self._padding_left_to_model:
                return None
        inputs = prepared(model, input_ids, named)
        if inputs is None:
            return None
        tokens, length = input_ids.shape[1], recorded_length(*input_ids.shape)
        if length is not None and length > room_of(cache):
            length = None
        inputs = padded(inputs, padding, length or tokens)
        try:
            if length is None:
                output = self._run(cache, inputs)
            else:
                output = self._recordings(cache, inputs, model.device)
        except (UnlikeOthersError, MaskWantedError):
            cache.reset()
            if padding is None:
                self._left_to_model = True
            self._padding_left_to_model = True
            return None
        take_back(cache, inputs["input_ids"].shape[1] - tokens)
        if "logits_to_keep" not in inputs:
            output.logits = output.logits[:, :tokens]
        return output

    def _run(self, cache: Any, inputs: dict[str, Any]) -> Any:
        model, others = self._model(), dict(inputs)
        count, padding = others.pop(COUNT), others.pop(PADDING, None)
        with contextlib.ExitStack() as stack:
            causal = stack.enter_context(prompt_kernels(model))
            linear = stack.enter_context(padded_prompts(count))
            moved = None if padding is None else stack.enter_context(states_moved_right(model, padding))
            output = model(return_dict=True, **with_cache(cache, others))
            if (causal(), linear()) != layers_of(cache) or without_cache(output).keys() - {"logits"}:
                raise UnlikeOthersError
        if moved is not None:
            if moved.times != 1:
                raise UnlikeOthersError
            move_cache_right(growing_layers(cache), padding, others["input_ids"].shape[1])
        return output


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
    config, cache, mask = model.config, cache_in(named), named.get("attention_mask")
    if model.training or config.is_encoder_decoder:
        return False
    if config.get_text_config(decoder=True)._attn_implementation != SDPA:
        return False
    if hasattr(type(model), MASKS):  # of its own, which need not be causal
        return False
    if input_ids.dim() != 2 or input_ids.shape[1] < 2 or why_not_recorded(cache) is not None:
        return False
    if not all(is_absent(value) for name, value in without_cache(named).items() if name not in KNOWN):
        return False
    if isinstance(named.get("logits_to_keep"), torch.Tensor) or held_by(cache) is None:
        return False
    return mask is None or mask.shape == input_ids.shape
