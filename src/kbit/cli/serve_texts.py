"""Prompts that cannot fit the model are refused before tokens are made of all their text.

Nobody else is answered while a prompt is tokenized. For tens of millions of characters, which a request may
have, that takes many seconds and gigabytes, only to say that the model has fewer positions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from kbit.cli.serve_fields import RequestError
from kbit.cli.texts import known_positions

MOST_CHARACTERS = 2**23  # where the model's positions are unknown: a million tokens of English are 5 million
# Prompts of fewer characters a position are tokenized at once, as those that fit are.
_CHARACTERS = 8
# A longer one's tokens are counted piece by piece, since no number of characters says that it does not fit:
# a token may be 128 spaces, and a tokenizer may drop spaces and whole words. What a cut adds is taken off.
_PIECE, _CUT = 2**16, 64

_model: ContextVar[Any] = ContextVar("model", default=None)  # that the request asks


def refuse_long_texts() -> None:
    """Have tokenizers refuse prompts of requests that the model has too few positions for."""
    from transformers import PreTrainedTokenizerBase
    from transformers.cli.serving.utils import BaseHandler

    BaseHandler._resolve_model = _noted(BaseHandler._resolve_model)
    PreTrainedTokenizerBase.__call__ = _checked(PreTrainedTokenizerBase.__call__)


def check_text(text: str, count: Callable[[str], int], positions: int | None) -> None:
    """Look at a prompt before it is tokenized.

    Args:
        text: the prompt.
        count: gives the number of a text's tokens.
        positions: that the model was trained for; None if that is unknown.

    Raises:
        RequestError: it has too many tokens, or characters where positions are unknown.
    """
    if positions is None and len(text) > MOST_CHARACTERS:
        told = f"the prompt may have at most {MOST_CHARACTERS:,} characters, got {len(text):,}. Shorten it."
        raise RequestError(told, None)
    if positions is None or len(text) <= max(_PIECE, _CHARACTERS * positions):
        return
    tokens = 0
    for start in range(0, len(text), _PIECE):
        tokens += max(0, count(text[start : start + _PIECE]) - _CUT)
        if tokens >= positions:
            raise RequestError(
                f"the prompt's {len(text):,} characters have more tokens than the {positions} positions that "
                "the model knows (max_position_embeddings), of which an answer needs at least 1. Shorten it.",
                None,
            )


def _noted(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """A handler's method to find a request's model, which notes it for the tokenizer."""

    @functools.wraps(resolve)
    def noted(self: Any, body: dict[str, Any]) -> Any:
        found = resolve(self, body)
        _model.set(found[1])
        return found

    return noted


def _checked(tokenize: Callable[..., Any]) -> Callable[..., Any]:
    """Tokenizers' `__call__`, for prompts of requests that fit."""

    @functools.wraps(tokenize)
    def checked(self: Any, text: Any = None, *args: Any, **named: Any) -> Any:
        def count(piece: str) -> int:
            return len(tokenize(self, piece, add_special_tokens=False, verbose=False)["input_ids"])

        if (model := _model.get()) is not None:
            for one in [text] if isinstance(text, str) else text or ():
                if isinstance(one, str):
                    check_text(one, count, known_positions(model))
        return tokenize(self, text, *args, **named)

    return checked
