"""Requests that are larger than any prompt with its images are refused, before they are read as JSON.

Much less text is too much for most models: `serve_texts` looks at it, just before it is tokenized.
"""

from __future__ import annotations

from typing import Any

from kbit.cli.serve_app import Message, Receive, when_built
from kbit.cli.serve_fields import RequestError
from kbit.cli.serve_routes import answer_to

MOST_BYTES = 2**25  # a million tokens of English are 5 MB; the rest is for images, as base64
_STATUS = 413  # "content too large"


def refuse_large_bodies() -> None:
    """Have requests of more than MOST_BYTES answered with status 413 and an error object."""
    when_built(lambda app: app.add_middleware(Limit))


class Limit:
    """ASGI middleware that reads bodies to their ends, and hands on those that are not too large.

    A client that is answered earlier would not look, while it still sends.
    """

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Any) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size, more, kept = 0, True, []
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            if size <= MOST_BYTES:
                kept.append(message)
            more = message.get("more_body", False)  # what says that the client has gone has none
        if size > MOST_BYTES:
            error = RequestError(f"a request may have at most {MOST_BYTES:,} bytes, got {size:,}.", None)
            await answer_to(error, status=_STATUS)(scope, receive, send)
            return
        read = iter(kept)

        async def receive_again() -> Message:
            message = next(read, None)
            return await receive() if message is None else message

        await self.app(scope, receive_again, send)
