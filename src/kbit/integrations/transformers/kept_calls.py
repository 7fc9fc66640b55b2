"""Which calls of `generate` leave caches that a later prompt can begin with, and of which models."""

from __future__ import annotations

from typing import Any

import torch

from kbit.integrations.transformers.config_parts import all_of
from kbit.integrations.transformers.kept_caches import has_states
from kbit.integrations.transformers.late_masks import MASKS

_MODES = {"greedy_search", "sample"}
_IMPLEMENTATIONS = {None, "dynamic", "static"}
# Settings by which `generate` computes other tokens than the prompt's, or gives its cache away.
_OTHER_WAYS = ("prefill_chunk_size", "return_dict_in_generate", "token_healing", "is_assistant")
_OF_NO_PROMPT = {"logits_to_keep", "use_cache"}  # what `generate` has for a model beside that
# Arguments, and what they say of tokens of a text without padding; positions beyond their number.
_OF_TOKENS = {"attention_mask": 1, "mm_token_type_ids": 0, "position_ids": 0}
# Kinds of models whose states go on with several tokens at once.
_WITH_STATES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
# Its cache drops what leaves the sliding window, of which its masks know nothing: a whole prompt sees itself.
_OF_TWO_WINDOWS = {"moshi"}
_SEES_WHAT_FOLLOWS = {True, "all"}  # values of Gemma's use_bidirectional_attention; "vision": of images alone
# Its config has BERT's field, which says that it is no decoder, and nothing of the model looks at it.
_CAUSAL_ANYHOW = {"gpt_neox_japanese"}


def may_keep(model: Any, generation_config: Any, mode: Any, model_kwargs: dict[str, Any]) -> bool:
    """Whether a call is of one prompt that is its tokens alone, and nobody else gets its cache."""
    if mode.value not in _MODES or (generation_config.num_return_sequences or 1) != 1:
        return False
    if generation_config.cache_implementation not in _IMPLEMENTATIONS:
        return False
    if generation_config.use_cache is False or any(
        getattr(generation_config, name, None) for name in _OTHER_WAYS
    ):
        return False
    if (generation_config.guidance_scale or 1) != 1:  # which computes another prompt beside it
        return False
    if hasattr(type(model), MASKS) or _turns_by_length(model.config) or _has_soft_prompt(model):
        return False
    if not _is_causal(model):
        return False
    return all(_says_nothing(name, value) for name, value in model_kwargs.items())


def _turns_by_length(config: Any) -> bool:
    """Whether rotary embeddings depend on how long the text is, so that keys of its beginning do."""
    for one in all_of(config):
        for name in ("rope_parameters", "rope_scaling"):
            if any(kind in str(getattr(one, name, None)) for kind in ("dynamic", "longrope")):
                return True
    return False


def _is_causal(model: Any) -> bool:
    """Whether keys and values of a text's beginning are the same whatever follows."""
    config = model.config.get_text_config(decoder=True)
    if config.model_type in _OF_TWO_WINDOWS or getattr(config, "is_causal", None) is False:
        return False
    if getattr(config, "use_bidirectional_attention", None) in _SEES_WHAT_FOLLOWS:
        return False
    # BERT's kin have the field. Configs of other models may hold it, too, and nothing looks at it there.
    has_field = hasattr(type(config), "is_decoder")
    said = (bool(own["is_causal"]) for own in map(vars, model.modules()) if "is_causal" in own)
    if (first := next(said, None)) is not None:
        # Not by all modules: towers for images, and attention to an encoder, see everything.
        return first or any(said) or (has_field and bool(config.is_decoder))
    # As decoders, too: in older versions of transformers the masks of these were none for a prompt's rest.
    return not has_field or config.model_type in _CAUSAL_ANYHOW


def _has_soft_prompt(model: Any) -> bool:
    """Whether peft, whose `generate` runs this one, puts learnt tokens in front of the prompt."""
    around = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return getattr(getattr(around, "active_peft_config", None), "is_prompt_learning", False)


def goes_on(model: Any, cache: Any) -> bool:
    """Whether a model is known to go on from what its cache holds, with all of a prompt's rest at once."""
    kind = model.config.get_text_config(decoder=True).model_type
    return kind in _WITH_STATES or not (getattr(model, "_is_stateful", False) or has_states(cache))


def _says_nothing(name: str, value: Any) -> bool:
    """Whether an argument of the model is as if it were not there."""
    if name in _OF_NO_PROMPT or value is None or (isinstance(value, dict) and not value):
        return True
    if name not in _OF_TOKENS or not isinstance(value, torch.Tensor):
        return False
    if name == "position_ids":
        value = value - torch.arange(value.shape[-1], device=value.device)
    return bool(torch.all(value == _OF_TOKENS[name]))
