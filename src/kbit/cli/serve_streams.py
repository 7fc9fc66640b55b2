"""Streams whose response begins with the first thing to send: until then a request can still be refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from kbit.cli.serve_gone import unless_gone


class StreamFailedError(RuntimeError):
    """What is streamed cannot be computed; the message is that of the error."""


class _Quotable(str):
    """A message that transformers pastes between quotes, and that is there as JSON has it."""

    __slots__ = ()

    def __format__(self, _: str) -> str:
        return json.dumps(str(self))[1:-1]


class Stream:
    """A stream's queue, whose first item may be looked at before it is taken.

    Attributes:
        streamer: what fills the queue, which can be told to stop.
    """

    def __init__(self, queue: Any, streamer: Any) -> None:
        self.streamer = streamer
        self._queue = queue
        self._looked_at: list[Any] = []

    async def first(self) -> Any:
        """The first item, which stays."""
        self._looked_at.append(await self._queue.get())
        return self._looked_at[0]

    async def get(self) -> Any:
        """The next item: a piece of the answer, an error, or None at the end."""
        return _as_sent(self._looked_at.pop() if self._looked_at else await self._queue.get())

    def get_nowait(self) -> Any:
        """The next item, or asyncio.QueueEmpty."""
        return _as_sent(self._looked_at.pop() if self._looked_at else self._queue.get_nowait())


_begun: ContextVar[Stream | None] = ContextVar("begun", default=None)


def _as_sent(item: Any) -> Any:
    from transformers.cli.serving.utils import _StreamError

    return _StreamError(_Quotable(item.msg)) if isinstance(item, _StreamError) else item


def note_streams() -> None:
    """Have `wait_for_stream` know of the streams that a request begins."""
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    for manager in (GenerateManager, CBGenerateManager):
        manager.generate_streaming = _noted(manager.generate_streaming)


def _noted(generate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(generate)
    def noted(*args: Any, **named: Any) -> tuple[Stream, Any]:
        queue, streamer = generate(*args, **named)
        stream = Stream(queue, streamer)
        _begun.set(stream)
        return stream, streamer

    return noted


async def wait_for_stream() -> None:
    """Wait until the stream that this request began, if it did, has something to send.

    Raises:
        StreamFailedError: that is an error.
        ClientGoneError: nobody waits for it any more.
    """
    from transformers.cli.serving.utils import _StreamError

    stream = _begun.get()
    if stream is None:
        return
    _begun.set(None)
    try:
        first = await unless_gone(stream.first())
    except BaseException:  # the server's end is one, too
        stream.streamer.cancel()
        raise
    if isinstance(first, _StreamError):
        raise StreamFailedError(first.msg)
