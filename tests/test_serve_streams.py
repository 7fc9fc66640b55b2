"""Streams of the server: what is looked at before they begin, and what is sent where they fail later."""

from __future__ import annotations

import asyncio
import json

import pytest
from openai.types.responses import ResponseErrorEvent
from transformers.cli.serving.utils import _StreamError

from kbit.cli import serve_gone, serve_requests, serve_streams

MESSAGE = 'no "such"\n\\thing'


class Streamer:
    """Knows whether it was told to stop."""

    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


def stream_of(*items):
    """A stream that the request of this context began."""
    queue = asyncio.Queue()
    for item in items:
        queue.put_nowait(item)
    stream, streamer = serve_streams._noted(lambda: (queue, Streamer()))()
    assert stream.streamer is streamer
    return stream


def test_what_was_looked_at_is_sent_first():
    async def run():
        await serve_streams.wait_for_stream()  # of a request that began none
        stream = stream_of("a", "b", None)
        await serve_streams.wait_for_stream()
        await serve_streams.wait_for_stream()  # it has begun
        assert [stream.get_nowait(), await stream.get(), await stream.get()] == ["a", "b", None]
        with pytest.raises(asyncio.QueueEmpty):
            stream.get_nowait()

    asyncio.run(run())


def test_an_error_before_anything_is_sent_is_raised():
    async def run():
        stream_of(_StreamError(MESSAGE))
        with pytest.raises(serve_streams.StreamFailedError) as found:
            await serve_streams.wait_for_stream()
        return found.value

    error = asyncio.run(run())
    told = serve_requests._explained(error, {"generation_config": "{}"}, "prompt")
    assert str(told) == f"the request's settings are of no use: {MESSAGE}"
    assert serve_requests._explained(error, {}, "prompt") is None


def test_a_later_error_is_sent_as_json():
    async def run():
        stream = stream_of("a", _StreamError(MESSAGE), _StreamError(MESSAGE))
        await serve_streams.wait_for_stream()
        assert await stream.get() == "a"
        return await stream.get(), stream.get_nowait()

    for item in asyncio.run(run()):
        assert isinstance(item, _StreamError)
        assert json.loads(f'{{"error": "{item.msg}"}}') == {"error": MESSAGE}  # as transformers writes it
        event = ResponseErrorEvent(type="error", sequence_number=0, message=item.msg)
        assert json.loads(event.model_dump_json())["message"] == MESSAGE


def test_a_client_that_goes_before_anything_is_sent_stops_its_stream():
    async def run():
        gone = serve_gone.Gone()
        serve_gone._gone.set(gone)
        stream = stream_of()
        waiting = asyncio.ensure_future(serve_streams.wait_for_stream())
        await asyncio.sleep(0)
        assert not stream.streamer.cancelled
        gone.set()
        with pytest.raises(serve_gone.ClientGoneError):
            await waiting
        assert stream.streamer.cancelled

    asyncio.run(run())
