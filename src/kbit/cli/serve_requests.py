"""Requests that transformers' server would answer with status 500, or not survive, learn what they lack."""

from __future__ import annotations

import functools
import json
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from kbit.cli.serve_answers import parse_answers_alone
from kbit.cli.serve_bodies import refuse_large_bodies
from kbit.cli.serve_fields import (
    RequestError,
    check_settings,
    tokens_of,
    without_nothings,
    wrong_input,
    wrong_messages,
    wrong_prompt,
)
from kbit.cli.serve_fitting import fit_requests
from kbit.cli.serve_gone import ClientGoneError, answer_to_nobody
from kbit.cli.serve_routes import answer_to, refuse_other_models
from kbit.cli.serve_streams import StreamFailedError, note_streams, wait_for_stream
from kbit.cli.serve_texts import refuse_long_texts

# What is wrong with a field's value, or None.
Check = Callable[[Any], str | None]

# Handlers' functions that make messages of a request, in the order in which they are called.
_READERS = ("_normalize_input", "get_processor_inputs_from_messages")
NO_TEMPLATE = (
    "tokenizer has no chat template, by which the server makes prompts of messages. Copy the "
    "chat_template.jinja of the model's chat variant into the folder"
)


def refuse_malformed() -> None:
    """Have requests that cannot be computed answered with status 400 and an error object."""
    from transformers.cli.serving import server
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.response import ResponseHandler

    ChatCompletionHandler.handle_request = _checked(ChatCompletionHandler, "messages", wrong_messages)
    CompletionHandler.handle_request = _checked(CompletionHandler, "prompt", wrong_prompt)
    ResponseHandler.handle_request = _whole(_checked(ResponseHandler, "input", wrong_input))
    for handler in (ChatCompletionHandler, CompletionHandler, ResponseHandler):
        handler._build_generation_config = _settled(handler._build_generation_config)
    for handler, field in ((ChatCompletionHandler, "messages"), (ResponseHandler, "input")):
        for name in _READERS:
            if hasattr(handler, name):
                setattr(handler, name, staticmethod(_read(getattr(handler, name), field)))
    if hasattr(server, "split_model_id"):  # of newer versions of transformers
        server.split_model_id = _of_text(server.split_model_id)
    ModelManager.process_model_name = staticmethod(_of_text(ModelManager.process_model_name))
    fit_requests()
    note_streams()
    parse_answers_alone()
    refuse_long_texts()
    refuse_other_models()
    refuse_large_bodies()


def _of_no_use(said: str, field: str | None) -> RequestError:
    """That transformers could not use a request's settings, of a field that is known to hold them."""
    return RequestError(f"the request's settings are of no use: {said}", field)


def _settled(build: Callable[..., Any]) -> Callable[..., Any]:
    """A handler's method to make a request's GenerationConfig, with RequestError for what it cannot be."""

    @functools.wraps(build)
    def settled(self: Any, body: dict, *args: Any, **kw: Any) -> Any:
        try:
            settings = build(self, body, *args, **kw)
            given = json.loads(body.get("generation_config") or "{}")
            if (body.get("temperature") or 0) > 0 and given.get("do_sample") is None:
                settings.do_sample = True  # which transformers leaves to the model's own settings
            _make_one(settings, given, body.get("stream"))
            bias = getattr(settings, "sequence_bias", None)
            if (of_tokens := body.get("logit_bias")) is not None:  # which transformers heeds in chats alone
                bias = {(int(token),): one for token, one in of_tokens.items()}
            if bias is not None:  # an empty one transformers refuses
                settings.sequence_bias = tokens_of(bias) or None
            return settings
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            field = None if body.get("generation_config") is None else "generation_config"
            raise _of_no_use(f"{str(error).rstrip('.')}.", field) from None

    return settled


def _make_one(settings: Any, given: Mapping[str, Any], streamed: Any) -> None:
    """Have settings make one answer, token by token, whatever the model's own say, as `kbit generate` does.

    Raises:
        ValueError: a request's generation_config asks for another kind, which it cannot get.
    """
    for name, fixed in (("num_return_sequences", True), ("num_beams", streamed)):
        asked = given.get(name)
        if fixed and asked not in (None, 1):
            answer = "a streamed answer" if name == "num_beams" else "an answer"
            raise ValueError(f"{name} of {answer} is 1, got {asked!r:.40}")
        setattr(settings, name, 1 if asked is None else asked)
    settings.return_dict_in_generate = False  # the server wants the tokens alone


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


def _of_text(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The server's function of a model's name, for names that are none; as it answers for a missing one."""

    @functools.wraps(find)
    def found(name: Any) -> Any:
        from fastapi import HTTPException

        if not isinstance(name, str):
            raise HTTPException(status_code=422, detail=f"model must be a string, got {name!r:.40}.")
        return find(name)

    return found


def _explained(error: Exception, body: Mapping[str, Any], field: str) -> RequestError | None:
    """What a request is told that brought an error about; None where nothing says that it did."""
    from jinja2 import TemplateError

    frames = traceback.walk_tb(error.__traceback__)
    in_template = any(frame.f_code.co_name == "apply_chat_template" for frame, _ in frames)
    if isinstance(error, TemplateError) or (in_template and isinstance(error, ArithmeticError)):
        return RequestError(f"the model's chat template refuses this: {error}.", field)
    if "chat_template is not set" in str(error):
        return RequestError(f"the model's {NO_TEMPLATE}, or ask /v1/completions.", field)
    said = str(error) if isinstance(error, StreamFailedError) else f"{type(error).__name__}: {error}"
    for_template = RequestError(f"chat_template_kwargs are of no use: {said}", "chat_template_kwargs")
    has_template_kwargs = bool(body.get("chat_template_kwargs"))
    if in_template and has_template_kwargs:
        return for_template
    if body.get("generation_config") is not None:
        return _of_no_use(said, "generation_config")
    # Some have the template return what the model does not take.
    return for_template if has_template_kwargs and isinstance(error, TypeError | ValueError) else None


def _checked(handler: Any, field: str, check: Check) -> Callable[..., Any]:
    handle = handler.handle_request

    @functools.wraps(handle)
    async def handle_request(self: Any, body: dict, request_id: str) -> Any:
        from fastapi import HTTPException
        from transformers.cli.serving.utils import CBWorkerDeadError

        try:
            if wrong := check(body.get(field)):
                raise RequestError(wrong, field)
            check_settings(body, _processor(self.model_manager))
            try:
                response = await handle(self, without_nothings(body), request_id)
                await wait_for_stream()
                return response
            except (HTTPException, RequestError, ClientGoneError, CBWorkerDeadError):
                raise
            except Exception as error:
                if (refusal := _explained(error, body, field)) is None:
                    raise
                raise refusal from None
        except ClientGoneError as error:
            error.__traceback__ = None  # the thread keeps the error until its next one, and so the cache
            return answer_to_nobody()
        except RequestError as error:
            return answer_to(error, field)

    return handle_request


def _processor(manager: Any) -> Any:
    """The served model's processor or tokenizer, where it is loaded."""
    return next((timed.processor for timed in manager.loaded_models.values()), None)
