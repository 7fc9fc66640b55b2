"""Tokens are drawn only where there are some to draw from.

On a GPU, drawing by probabilities that are no numbers ends the process's use of it, and so the server's. A
request's settings can lead there: all tokens suppressed, or factors and biases beyond what numbers hold.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kbit.cli.serve_fields import RequestError


def look_before_drawing() -> None:
    """Have `generate` look at logits last of all, if it got the processor that does."""
    from transformers import GenerationMixin

    GenerationMixin._get_logits_processor = _with_ours_last(GenerationMixin._get_logits_processor)


def with_something_to_draw(inputs: dict[str, Any], settings: Any, own: Any) -> dict[str, Any]:
    """What `generate` gets, with a look at each step's logits where tokens are drawn.

    Args:
        inputs: arguments of `generate`.
        settings: the request's own GenerationConfig.
        own: the model's, which says what the request does not.
    """
    from transformers import LogitsProcessorList

    draws = settings.do_sample if settings.do_sample is not None else own.do_sample
    if not draws:
        return inputs
    processors = [*inputs.get("logits_processor", ()), _refusing()()]
    return {**inputs, "logits_processor": LogitsProcessorList(processors)}


def _with_ours_last(make: Callable[..., Any]) -> Callable[..., Any]:
    """Behind temperature, watermarks and the like, which transformers puts after what a caller gives."""

    @functools.wraps(make)
    def with_ours_last(*args: Any, **named: Any) -> Any:
        processors = make(*args, **named)
        processors.sort(key=lambda one: isinstance(one, _refusing()))
        return processors

    return with_ours_last


@functools.cache
def _refusing() -> Any:
    """A logits processor that changes nothing, and raises RequestError for what nothing can be drawn from."""
    from transformers import LogitsProcessor

    class Refusing(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            # Of a row with NaN that is NaN, and -inf where no token is left.
            if not bool(scores.amax(-1).isfinite().all()):
                raise RequestError(
                    "no token can be drawn by these settings: all are suppressed, or logits became infinite "
                    "by a bias or a penalty. Leave some tokens, and give finite numbers.",
                    "generation_config",
                )
            return scores

    return Refusing
