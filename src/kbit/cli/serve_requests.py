"""Requests that transformers' server would answer with status 500, or not survive, are told what they lack.

Continuous batching computes all requests in one thread. An exception there, by a prompt without tokens or by
a request that is larger than the whole cache, or by a temperature that leaves nothing to sample, ends that
thread: the server answers nothing from then on.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from kbit.cli.serve_fields import (
    RequestError,
    check_settings,
    wrong_input,
    wrong_messages,
    wrong_prompt,
)
from kbit.cli.serve_gone import ClientGoneError, answer_to_nobody
from kbit.cli.texts import known_positions, wrong_ids

# What is wrong with a field's value, or None.
Check = Callable[[Any], str | None]

# Handlers' functions that make messages of a request, in the order in which they are called.
_READERS = ("_normalize_input", "get_processor_inputs_from_messages")
# Settings that batched requests share: the first one's, see docs/serving.md.
_SHARED = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "use_cache")
NO_TEMPLATE = (
    "tokenizer has no chat template, by which the server makes prompts of messages. Copy the "
    "chat_template.jinja of the model's chat variant into the folder"
)


def refuse_malformed() -> None:
    """Have requests that cannot be computed answered with status 400 and an error object."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    ChatCompletionHandler.handle_request = _checked(ChatCompletionHandler, "messages", wrong_messages)
    CompletionHandler.handle_request = _checked(CompletionHandler, "prompt", wrong_prompt)
    ResponseHandler.handle_request = _whole(_checked(ResponseHandler, "input", wrong_input))
    for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
        handler._build_generation_config = _settled(handler._build_generation_config)
    for handler, field in ((ChatCompletionHandler, "messages"), (ResponseHandler, "input")):
        for name in _READERS:
            if hasattr(handler, name):
                setattr(handler, name, staticmethod(_read(getattr(handler, name), field)))
    for manager in (GenerateManager, CBGenerateManager):
        for method in ("generate_streaming", "generate_non_streaming"):
            setattr(manager, method, _fitted(getattr(manager, method)))
    CBGenerateManager.init_cb = _shared(CBGenerateManager.init_cb)


def fit(tokens: int, settings: Any, room: int | None, positions: int | None = None) -> None:
    """Shorten the answer to what the cache holds, and the model was made for, beside the prompt.

    Args:
        tokens: of the prompt.
        settings: the request's own GenerationConfig.
        room: tokens that the whole cache holds; None if that is unknown or there is none.
        positions: that the model was trained for; None if that is unknown.

    Raises:
        RequestError: the prompt has no tokens, or leaves no room for an answer.
    """
    if not tokens:
        raise RequestError("the prompt has no tokens. Give it some words.", None)
    if positions is not None and tokens >= positions:
        raise RequestError(
            f"the prompt has {tokens} tokens, and the model knows {positions} positions, of which an answer "
            f"needs at least 1. Shorten it.",
            None,
        )
    if positions is not None and settings.max_new_tokens is not None:
        settings.max_new_tokens = min(settings.max_new_tokens, positions - tokens)
    if room is None:
        return
    if tokens >= room:
        raise RequestError(
            f"the prompt has {tokens} tokens, and the server's cache holds {room}, of which an answer needs "
            f"at least 1. Shorten it, or start the server with more --cb-num-blocks.",
            None,
        )
    if settings.max_new_tokens is not None:
        settings.max_new_tokens = min(settings.max_new_tokens, room - tokens)


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
    tokens = (token for sequence in getattr(settings, "sequence_bias", None) or {} for token in sequence)
    if most is not None and (wrong := next((token for token in tokens if token >= most), None)):
        raise RequestError(f"logit_bias names token {wrong}, and the model has {most}.", "logit_bias")


def _fitted(generate: Callable[..., Any]) -> Callable[..., Any]:
    """A manager's method to generate, for requests that fit its cache."""

    @functools.wraps(generate)
    def fitted(
        self: Any, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kw: Any
    ) -> Any:
        ids = inputs["input_ids"]
        tokens = len(ids) if isinstance(ids, list) else ids.shape[-1]
        fit(tokens, gen_config, _room(self), known_positions(model))
        _check_ids(ids, model)
        _check_bias(gen_config, model)
        return generate(self, model, processor, inputs, gen_config, *args, **kw)

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


def _settled(build: Callable[..., Any]) -> Callable[..., Any]:
    """A handler's method to make a request's GenerationConfig, with RequestError for what it cannot be."""

    @functools.wraps(build)
    def settled(self: Any, body: dict, *args: Any, **kw: Any) -> Any:
        try:
            settings = build(self, body, *args, **kw)
            if (body.get("temperature") or 0) > 0 and body.get("generation_config") is None:
                settings.do_sample = True  # which transformers leaves to the model's own settings
            bias = getattr(settings, "sequence_bias", None)
            if (of_tokens := body.get("logit_bias")) is not None:  # which transformers heeds in chats alone
                bias = {(int(token),): one for token, one in of_tokens.items()}
            if bias is not None:  # an empty one transformers refuses
                settings.sequence_bias = {tokens: float(one) for tokens, one in dict(bias).items()} or None
            return settings
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise RequestError(f"the request's settings are of no use: {error}.", None) from None

    return settled


def _read(reader: Callable[..., Any], field: str) -> Callable[..., Any]:
    """A handler's function that reads messages, with RequestError for those that lack what it looks for."""

    @functools.wraps(reader)
    def read(*args: Any, **kw: Any) -> Any:
        try:
            return reader(*args, **kw)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            wrong = f"{field} cannot be read: {type(error).__name__}: {error}."
            raise RequestError(wrong, field) from None

    return read


def _whole(handle: Callable[..., Any]) -> Callable[..., Any]:
    """A handler of requests whose answers are streamed only where they ask for it, as OpenAI's are."""

    @functools.wraps(handle)
    async def handle_request(self: Any, body: dict, request_id: str) -> Any:
        return await handle(self, {"stream": False, **body}, request_id)

    return handle_request


def _checked(handler: Any, field: str, check: Check) -> Callable[..., Any]:
    handle = handler.handle_request

    @functools.wraps(handle)
    async def handle_request(self: Any, body: dict, request_id: str) -> Any:
        from fastapi.responses import JSONResponse
        from jinja2 import TemplateError

        try:
            if wrong := check(body.get(field)):
                raise RequestError(wrong, field)
            check_settings(body)
            if body.get("stop") == []:
                body = {name: value for name, value in body.items() if name != "stop"}
            try:
                return await handle(self, body, request_id)
            except (TemplateError, ArithmeticError) as error:
                raise RequestError(f"the model's chat template refuses this: {error}.", field) from None
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                if "chat_template is not set" in str(error):
                    raise RequestError(f"the model's {NO_TEMPLATE}, or ask /v1/completions.", field) from None
                if body.get("generation_config") is None:
                    raise
                wrong = f"the request's settings are of no use: {type(error).__name__}: {error}"
                raise RequestError(wrong, "generation_config") from None
        except ClientGoneError as error:
            error.__traceback__ = None  # the thread keeps the error until its next one, and so the cache
            return answer_to_nobody()
        except RequestError as error:
            told = {
                "message": str(error),
                "type": "invalid_request_error",
                "param": error.field or field,
                "code": None,
            }
            return JSONResponse({"error": told}, status_code=400)

    return handle_request
