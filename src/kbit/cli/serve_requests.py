"""Requests that transformers' server would answer with status 500 are told what they lack instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

# What is wrong with a field's value, or None.
Check = Callable[[Any], str | None]


def refuse_malformed() -> None:
    """Have bodies without messages, or without input, answered with status 400 and an error object."""
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.response import ResponseHandler

    ChatCompletionHandler.handle_request = _checked(ChatCompletionHandler, "messages", wrong_messages)
    ResponseHandler.handle_request = _checked(ResponseHandler, "input", wrong_input)


def wrong_messages(messages: Any) -> str | None:
    """What of a chat's messages the server could not read, or None."""
    if not isinstance(messages, list) or not messages:
        return 'messages must be a list of at least one, such as {"role": "user", "content": "Hello"}.'
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'messages[{index}] must be an object with a role, "user" for one.'
        if not isinstance(message.get("content"), str | list | None):
            return f"messages[{index}].content must be a string or a list of parts."
    return None


def wrong_input(value: Any) -> str | None:
    """What of a response's input the server could not read, or None; in lists it looks itself."""
    return None if isinstance(value, str | list) else "input must be a string or a list."


def _checked(handler: Any, field: str, check: Check) -> Callable[..., Any]:
    handle = handler.handle_request

    @functools.wraps(handle)
    async def handle_request(self: Any, body: dict, request_id: str) -> Any:
        wrong = check(body.get(field))
        if wrong is None:
            return await handle(self, body, request_id)
        from fastapi.responses import JSONResponse

        error = {"message": wrong, "type": "invalid_request_error", "param": field, "code": None}
        return JSONResponse({"error": error}, status_code=400)

    return handle_request
