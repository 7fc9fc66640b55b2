"""A request's generation_config: which of transformers' settings it may have, and how much work they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_BEAMS = 16  # each has keys and values of its own
# What decides which tokens an answer has and where it ends, and nothing that later versions add. Of the rest,
# `assistant_early_exit` takes layers from the model that all requests share, and an error meanwhile leaves it
# without them; others make caches of any size, compile the model, run code of the hub, or return no tokens.
_TAKEN = {
    # where an answer ends
    *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "max_time", "stop_strings"),
    *("exponential_decay_length_penalty", "eos_token_id", "forced_eos_token_id", "forced_bos_token_id"),
    *("bos_token_id", "pad_token_id", "decoder_start_token_id"),
    # how a token is drawn
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff"),
    *("eta_cutoff", "renormalize_logits", "remove_invalid_values", "watermarking_config", "guidance_scale"),
    # from which tokens
    *("repetition_penalty", "encoder_repetition_penalty", "sequence_bias", "bad_words_ids"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens"),
    # out of how many texts, and by which drafts
    *("num_beams", "num_return_sequences", "length_penalty", "early_stopping"),
    *("prompt_lookup_num_tokens", "max_matching_ngram_size"),
    # what `to_json_string` of a GenerationConfig adds
    *("transformers_version", "_from_model_config", "_commit_hash"),
}
# What that writes of a model's own settings, too; other values of these are refused.
_SAYS_NOTHING = {
    "use_cache": True,
    "return_dict_in_generate": False,
    **dict.fromkeys(("output_scores", "output_logits", "output_attentions", "output_hidden_states"), False),
}
# A draft that is looked up in the prompt has logits for each of its tokens, and is looked for by n-grams of
# every size up to the largest.
_MOST = {"num_beams": MOST_BEAMS, "prompt_lookup_num_tokens": 64, "max_matching_ngram_size": 16}
_MOST_ENDS = 16  # with beams: for each of these a step copies every beam's text


def wrong_settings(settings: Mapping[str, Any]) -> str | None:
    """What of a generation_config the server does not take from a request, or None."""
    if refused := sorted(name for name, value in settings.items() if not _is_taken(name, value)):
        return (
            f"generation_config may not set {', '.join(refused):.80}: from a request the server takes only "
            f"what chooses its tokens or ends its answer. Leave that out, or call generate in Python."
        )
    for name, most in _MOST.items():
        value = settings.get(name)
        if value is not None and not (type(value) is int and 1 <= value <= most):
            return f"{name} must be a whole number from 1 to {most}, got {value!r:.40}."
    return _wrong_ends(settings.get("eos_token_id"), settings.get("num_beams") or 1)


def _is_taken(name: str, value: Any) -> bool:
    return name in _TAKEN or value is None or value is _SAYS_NOTHING.get(name)


def _wrong_ends(given: Any, beams: int) -> str | None:
    """What is wrong with the tokens that end an answer, or None."""
    ends = given if isinstance(given, list) else [given]
    if given is not None and not all(type(one) is int for one in ends):
        return f"eos_token_id must be a whole number or a list of them, got {given!r:.40}."
    if beams > 1 and len(ends) > _MOST_ENDS:
        return f"eos_token_id may have at most {_MOST_ENDS} tokens beside num_beams, got {len(ends)}."
    return None
