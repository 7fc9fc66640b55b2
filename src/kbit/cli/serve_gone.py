"""Answers for clients that have gone are not computed to the end.

transformers' server stops a stream when its client goes. Other requests it computes one after the other, each
to its end: clients that give up and ask again would fill the queue with answers that nobody waits for.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

from kbit.cli.serve_app import Message, Receive, when_built


class Gone(threading.Event):
    """That a client has gone, for threads that compute and, as `told`, for coroutines that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.told = asyncio.Event()

    def set(self) -> None:
        """See threading.Event; for the thread of the event loop."""
        super().set()
        self.told.set()


_STATUS = 499  # nginx's for a client that closed its request; nobody reads it
_gone: ContextVar[Gone | None] = ContextVar("gone", default=None)
_stops: ContextVar[threading.Event | None] = ContextVar("stops", default=None)  # the same, of an answer


class ClientGoneError(Exception):
    """Whoever asked has closed the connection."""


class Watch:
    """ASGI middleware that learns when a request's client goes, while the request is computed."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gone = Gone()
        watching: asyncio.Task[Message] | None = None

        async def watch() -> Message:
            while (message := await receive())["type"] != "http.disconnect":
                pass
            gone.set()
            return message

        async def receive_and_watch() -> Message:
            nonlocal watching
            if watching is not None:
                return await asyncio.shield(watching)  # several may wait for it
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                watching = asyncio.create_task(watch())
            return message

        token = _gone.set(gone)
        try:
            await self.app(scope, receive_and_watch, send)
        finally:
            _gone.reset(token)
            if watching is not None:
                watching.cancel()


def stop_for_clients_that_have_gone() -> None:
    """Have transformers' server, one request at a time, stop computing what nobody waits for."""
    from transformers.cli.serving.utils import GenerateManager

    GenerateManager.generate_non_streaming = _stoppable(GenerateManager.generate_non_streaming)
    GenerateManager.async_submit = _checked_first(GenerateManager.async_submit)
    when_built(lambda app: app.add_middleware(Watch))  # the outermost


def _stoppable(generate: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(generate)
    async def stoppable(self: Any, model: Any, processor: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        from transformers import LogitsProcessorList

        gone = _gone.get()
        if gone is None:
            return await generate(self, model, processor, inputs, *args, **named)
        processors = [*inputs.get("logits_processor", ()), _raising(gone)]
        checked = {**inputs, "logits_processor": LogitsProcessorList(processors)}
        token = _stops.set(gone)
        try:
            return await generate(self, model, processor, checked, *args, **named)
        finally:
            _stops.reset(token)

    return stoppable


def _checked_first(submit: Callable[..., Any]) -> Callable[..., Any]:
    """Calls are queued, and looked at again when their turn comes: the first step reads the whole prompt."""

    @functools.wraps(submit)
    def checked(self: Any, fn: Callable[..., Any], *args: Any, **named: Any) -> Any:
        gone = _stops.get()

        def call(*args: Any, **named: Any) -> Any:
            if gone is not None and gone.is_set():
                raise ClientGoneError
            return fn(*args, **named)

        return submit(self, call, *args, **named)

    return checked


def _raising(gone: threading.Event) -> Any:
    """A logits processor, which is called at every step, that changes nothing."""
    from transformers import LogitsProcessor

    class Raising(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if gone.is_set():
                raise ClientGoneError
            return scores

    return Raising()


async def unless_gone(waiting: Coroutine[Any, Any, Any]) -> Any:
    """What is waited for.

    Raises:
        ClientGoneError: the request's client goes before it is there.
    """
    gone = _gone.get()
    if gone is None:
        return await waiting
    task, leaving = asyncio.ensure_future(waiting), asyncio.ensure_future(gone.told.wait())
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        leaving.cancel()


def answer_to_nobody() -> Any:
    """The response to a request whose client has gone."""
    from starlette.responses import Response

    return Response(status_code=_STATUS)
