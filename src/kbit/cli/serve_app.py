"""transformers' server as an ASGI application, and what is done to it once it is built."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


def when_built(change: Callable[[Any], None]) -> None:
    """Have `change` called with the application; middleware of later calls is further out."""
    from transformers.cli.serving import server

    build = server.build_server

    @functools.wraps(build)
    def built(*args: Any, **named: Any) -> Any:
        app = build(*args, **named)
        change(app)
        return app

    server.build_server = built
