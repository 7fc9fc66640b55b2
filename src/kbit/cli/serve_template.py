"""What the server tells a chat template for a request: only what is the template's own."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Mapping
from typing import Any

# A parameter of the function that applies templates, which hands it on to them.
_OF_TEMPLATES = {"documents"}


def wrong_template_kwargs(value: Any, processor: Any = None) -> str | None:
    """What of arguments for the chat template the server could not hand on, or None.

    Args:
        value: of the field or the option.
        processor: of the model, where it is loaded; a tokenizer, or what takes images, too.
    """
    if not isinstance(value, Mapping):
        return 'must be an object, such as {"enable_thinking": false}.'
    taken = _taken() | _fields(getattr(processor, "valid_processor_kwargs", None))
    if named := sorted(taken & set(value)):
        return f"may not name {', '.join(named)}: they are for what only the template takes. Leave that out."
    return None


@functools.cache
def _taken() -> frozenset[str]:
    """What transformers takes itself of a template's arguments.

    Some of it is the server's to say. The rest would let a request cut off its prompt, have it padded to more
    than there is memory for, or bring a template that never ends.
    """
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.processing_utils import ProcessingKwargs
    from transformers.utils.chat_template_utils import render_jinja_template

    kinds: tuple[Any, ...] = (PreTrainedTokenizerBase, ProcessorMixin)
    functions = [render_jinja_template]
    functions += [function for kind in kinds for function in (kind.apply_chat_template, kind.__call__)]
    named = {name for function in functions for name in inspect.signature(function).parameters}
    return frozenset((named | {"messages"} | _fields(ProcessingKwargs)) - _OF_TEMPLATES)


def _fields(kind: Any) -> set[str]:
    """The names of a TypedDict's fields, and of those of fields that are TypedDicts."""
    if not typing.is_typeddict(kind):
        return set()
    fields = kind.__annotations__
    return set(fields).union(*map(_fields, fields.values()))
