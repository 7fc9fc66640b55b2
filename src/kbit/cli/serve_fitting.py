"""Requests to transformers' server, made to fit the model's positions and the paged cache, and told apart.

Continuous batching computes all requests in one thread. An exception there, by a request that is larger than
the whole cache or by two of one id, ends that thread: the server answers nothing from then on.
"""

from __future__ import annotations

import copy
import functools
import uuid
from collections.abc import Callable
from typing import Any

import torch

from kbit.cli.serve_fields import RequestError, tokens_of
from kbit.cli.serve_sampling import look_before_drawing, with_something_to_draw
from kbit.cli.texts import known_positions, too_long, wrong_ids

# Settings that batched requests share: the first one's, see docs/serving.md.
_SHARED = ("do_sample", "temperature", "top_p", "top_k", "use_cache")
_OF_TOKENS = ("eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "pad_token_id", "bos_token_id")
_TOKENS_OF_GENERATE = 20  # of an answer, where nobody says how long it may get


def fit_requests() -> None:
    """Have requests fit the model and the cache, each batched one by an id of its own."""
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    for manager in (GenerateManager, CBGenerateManager):
        for method in ("generate_streaming", "generate_non_streaming"):
            setattr(manager, method, _fitted(getattr(manager, method)))
    CBGenerateManager.init_cb = _shared(CBGenerateManager.init_cb)
    look_before_drawing()


def fit(
    tokens: int, settings: Any, room: int | None, positions: int | None = None, own: Any | None = None
) -> None:
    """Shorten the answer to what the cache holds, and the model was made for, beside the prompt.

    Args:
        tokens: of the prompt.
        settings: the request's own GenerationConfig, whose max_new_tokens is set.
        room: tokens that the whole cache holds; None if that is unknown or there is none.
        positions: that the model was trained for; None if that is unknown.
        own: the model's own GenerationConfig, which says what the request does not.

    Raises:
        RequestError: the prompt has no tokens, or leaves no room for an answer.
    """
    if not tokens:
        raise RequestError("the prompt has no tokens. Give it some words.", None)
    if positions is not None and tokens >= positions:
        raise RequestError(too_long(tokens, positions), None)
    if room is not None and tokens >= room:
        raise RequestError(
            f"the prompt has {tokens} tokens, and the server's cache holds {room}, of which an answer needs "
            f"at least 1. Shorten it, or start the server with more --cb-num-blocks.",
            None,
        )
    # Batches know no max_length, and without max_new_tokens an answer of theirs has no end.
    left = [most - tokens for most in (positions, room) if most is not None]
    settings.max_new_tokens = min([_longest(tokens, settings, own), *left])
    settings.max_length = None  # which would be another word on that


def _longest(tokens: int, *given: Any) -> int:
    """How long an answer may get, by the first settings that say so, as `generate` of a model has it.

    Raises:
        RequestError: the prompt is as long as it and its answer may be.
    """
    for settings in given:
        if settings is None:
            continue
        if settings.max_new_tokens is not None:
            return int(settings.max_new_tokens)
        if settings.max_length is not None:
            if settings.max_length <= tokens:
                raise RequestError(
                    f"the prompt has {tokens} tokens, and max_length, which counts them too, is "
                    f"{settings.max_length}. Give a larger one, or max_new_tokens.",
                    "generation_config",
                )
            return int(settings.max_length) - tokens
    return _TOKENS_OF_GENERATE


def _room(manager: Any) -> int | None:
    """Tokens that a manager's paged cache holds; None if it has none, or its size is not known yet."""
    # Made by the thread that computes, perhaps after the first request came: then the options have to do.
    cache = getattr(getattr(getattr(manager, "_cb", None), "batch_processor", None), "cache", None)
    for name in ("max_tokens_read", "num_pages"):  # of newer and of older versions of transformers
        if (held := getattr(cache, name, None)) is not None:
            return held
    config = getattr(manager, "_cb_config", None)
    blocks, size = (getattr(config, name, None) for name in ("num_blocks", "page_size"))
    size = size or getattr(config, "block_size", None)
    return blocks * size if blocks and size else None


def _check_ids(ids: Any, model: Any) -> None:
    """Raises RequestError for tokens that the model does not have: its tokenizer is another model's."""
    if wrong := wrong_ids(torch.as_tensor(ids), model):
        raise RequestError(f"the server's {wrong}: it is another model's.", None)


def _check_bias(settings: Any, model: Any) -> None:
    """Raises RequestError for biases of tokens that the model does not have."""
    most = getattr(model.config.get_text_config(), "vocab_size", None)
    biases = tokens_of(getattr(settings, "sequence_bias", None) or {})
    tokens = (token for sequence in biases for token in sequence)
    if most is not None and (wrong := next((token for token in tokens if token >= most), None)):
        raise RequestError(f"logit_bias names token {wrong}, and the model has {most}.", "logit_bias")


def _check_tokens(settings: Any, model: Any) -> None:
    """Raises RequestError for single tokens of a request that the model does not have.

    On a GPU, looking for their logits would end this process's use of it. -1 is the last one to PyTorch, and
    none at all to those who want an answer without an end. The model's own settings are left as they are.
    """
    most = getattr(model.config.get_text_config(), "vocab_size", None)
    for name in _OF_TOKENS:
        given = getattr(settings, name, None)
        if most is None or given == getattr(model.generation_config, name, None):
            continue
        tokens = given if isinstance(given, list) else [given]
        if wrong := next((one for one in tokens if isinstance(one, int) and not -1 <= one < most), None):
            raise RequestError(f"{name} names token {wrong}, and the model has {most}.", "generation_config")


def _fitted(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A manager's method to generate, for requests that fit its cache."""

    @functools.wraps(generate)
    def fitted(
        self: Any,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        *args: Any,
        **kw: Any,
    ) -> Any:
        ids = inputs["input_ids"]
        tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
        fit(tokens, gen_config, _room(self), known_positions(model), model.generation_config)
        _check_ids(ids, model)
        _check_bias(gen_config, model)
        _check_tokens(gen_config, model)
        if hasattr(self, "_cb"):  # the client's may be that of another request under way
            request_id = str(uuid.uuid4())
        else:
            inputs = with_something_to_draw(inputs, gen_config, model.generation_config)
        return generate(self, model, processor, inputs, gen_config, request_id, *args, **kw)

    return fitted


def _shared(init_cb: Callable[..., Any]) -> Callable[..., Any]:
    """A manager's method to begin batching, by the model's settings and few of the first request's.

    All of them would decide for every later request, and may be such that no request survives.
    """

    @functools.wraps(init_cb)
    def begun(self: Any, model: Any, gen_config: Any) -> None:
        if self._cb is None:
            first, gen_config = gen_config, copy.deepcopy(model.generation_config)
            for name in _SHARED:
                setattr(gen_config, name, getattr(first, name, None))
        init_cb(self, model, gen_config)

    return begun
