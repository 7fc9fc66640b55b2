"""Bodies of requests: those of any size are read to their ends, and kept where they are not too large."""

from __future__ import annotations

import asyncio
import json

import pytest

from kbit.cli import serve_bodies

GONE = {"type": "http.disconnect"}


def part(body, more):
    return {"type": "http.request", "body": body, "more_body": more}


def handled(messages, kind="http"):
    """What an app behind the limit received, what was sent, and what is left to receive."""
    messages, received, sent = list(messages), [], []

    async def app(scope, receive, send):
        while messages or not received or received[-1].get("more_body"):
            received.append(await receive())
            if received[-1] == GONE:
                break

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(serve_bodies.Limit(app)({"type": kind}, receive, send))
    return received, sent, messages


@pytest.fixture(autouse=True)
def ten_bytes(monkeypatch):
    monkeypatch.setattr(serve_bodies, "MOST_BYTES", 10)


@pytest.mark.parametrize(
    "messages",
    [
        [part(b"", False)],
        [part(b"0123456789", False)],
        [part(b"01234", True), part(b"56789", True), part(b"", False)],
        [part(b"01234", False), GONE],  # which says when the client goes
        [part(b"01234", True), GONE],
    ],
)
def test_what_is_small_is_handed_on(messages):
    assert handled(messages) == (messages, [], [])


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_large_is_refused_at_its_end(whole):
    parts = [part(b"0" * 12, False)] if whole else [part(b"0" * 4, True)] * 2 + [part(b"0" * 4, False)]
    received, (start, body), left = handled(parts)
    assert (received, left, start["status"]) == ([], [], 413)
    error = json.loads(body["body"])["error"]
    assert error["message"] == "a request may have at most 10 bytes, got 12."
    assert error["type"] == "invalid_request_error"


def test_what_is_no_request_passes():
    messages = [{"type": "lifespan.startup"}]
    assert handled(messages, "lifespan") == (messages, [], [])
