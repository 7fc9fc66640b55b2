"""Routes of transformers' server that load other models than the served one, which they are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kbit.cli.serve_app import when_built
from kbit.cli.serve_fields import RequestError


def refuse_other_models() -> None:
    """Have /load_model and /v1/audio/transcriptions answer with status 400 to what they cannot be given."""
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.transcription import TranscriptionHandler

    TranscriptionHandler.handle_request = _no_transcription
    ModelManager.load_model_streaming = _of_the_served(ModelManager.load_model_streaming)
    when_built(_tell)


async def _no_transcription(*_: Any) -> Any:
    raise RequestError("this server transcribes no sound. Ask /v1/chat/completions or /v1/completions.", None)


def _of_the_served(load: Callable[..., Any]) -> Callable[..., Any]:
    """The manager's method to load a model that a request names, for the one that the server began with."""

    @functools.wraps(load)
    def loaded(self: Any, name: str, gguf_file: str | None = None) -> Any:
        from transformers.cli.serving import utils

        split = getattr(utils, "split_model_id", lambda whole: (whole, None))  # older versions have no GGUF
        served, file = split(self.force_model)
        if (name, gguf_file) != (self.process_model_name(served), file):
            raise RequestError(f"this server has no other model than {self.force_model}.", "model")
        return load(self, name, gguf_file) if gguf_file else load(self, name)

    return loaded


def _tell(app: Any) -> None:
    async def tell(_: Any, error: Any) -> Any:
        return answer_to(error)

    app.add_exception_handler(RequestError, tell)


def answer_to(error: RequestError, field: str | None = None, status: int = 400) -> Any:
    """The response to a request that is refused; `field` is the one that is at fault where none is named."""
    from fastapi.responses import JSONResponse

    named = error.field or field
    told = {"message": str(error), "type": "invalid_request_error", "param": named, "code": None}
    return JSONResponse({"error": told}, status_code=status)
