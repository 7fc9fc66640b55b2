"""Fields of a request to the server: what they may be, and what is said of those that are something else."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from kbit.cli.generate import HALF_A_PAIR, LEAST_TEMPERATURE
from kbit.cli.serve_settings import wrong_settings
from kbit.cli.serve_template import wrong_template_kwargs

_MOST = 1e6
_COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length")
# Which numbers a field may have, and the same in words.
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda value: value == 0 or LEAST_TEMPERATURE <= value <= _MOST,
        f"0, which decodes greedily, or from {LEAST_TEMPERATURE:g} to {_MOST:g}",
    ),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (lambda value: 0 <= value <= _MOST and value == int(value), "a whole one of at least 0"),
    "frequency_penalty": (lambda value: -1 < value <= _MOST, f"above -1 and at most {_MOST:g}"),
    "repetition_penalty": (lambda value: 0 < value <= _MOST, f"above 0 and at most {_MOST:g}"),
}
_TEXTS = ("suffix", "instructions")
# Of `stop`: each character is compared with all tokens, before the first of an answer.
_MOST_STOPS, _LONGEST_STOP = 4, 64
_SEEDS = range(-(2**63), 2**64)  # that torch takes
# Values by which fields say nothing, and transformers does not know that.
_NOTHINGS: dict[str, Any] = {"stop": [], "chat_template_kwargs": None, "parallel_tool_calls": None}


class RequestError(Exception):
    """A request that is answered with status 400: what is wrong, and with which field of it."""

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


def wrong_messages(messages: Any) -> str | None:
    """What of a chat's messages the server could not read, or None."""
    if not isinstance(messages, list) or not messages:
        return 'messages must be a list of at least one, such as {"role": "user", "content": "Hello"}.'
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            return f'messages[{index}] must be an object with a role, "user" for one.'
        content = message.get("content")
        if not isinstance(content, str | list | None):
            return f"messages[{index}].content must be a string or a list of parts."
        if isinstance(content, list) and not all(map(_is_part, content)):
            return (
                f'messages[{index}].content must have objects as parts: {{"type": "text", "text": "Hello"}}.'
            )
        if not _are_objects(message.get("tool_calls")):
            return f"messages[{index}].tool_calls must be a list of objects."
    return None


def _is_part(part: Any) -> bool:
    """Whether it is an object, and if of text has one."""
    if not isinstance(part, Mapping):
        return False
    return part.get("type") != "text" or isinstance(part.get("text"), str)


def _are_objects(value: Any) -> bool:
    """Whether it is a list of objects, or nothing."""
    return value is None or (isinstance(value, list) and all(isinstance(one, Mapping) for one in value))


def wrong_prompt(prompt: Any) -> str | None:
    """What of a completion's prompt the server could not read, or None."""
    return None if isinstance(prompt, str) else "prompt must be a string."


def wrong_input(value: Any) -> str | None:
    """What of a response's input the server could not read, or None."""
    if isinstance(value, list) and not (value and all(isinstance(item, Mapping) for item in value)):
        return "input must be a string, or a list of at least one object."
    return None if isinstance(value, str | list) else "input must be a string or a list."


def without_nothings(body: Mapping[str, Any]) -> dict[str, Any]:
    """A request without fields that say nothing, of its messages too."""
    said = {name: value for name, value in body.items() if name not in _NOTHINGS or value != _NOTHINGS[name]}
    if isinstance(messages := said.get("messages"), list):
        said["messages"] = [_without_no_calls(message) for message in messages]
    return said


def _without_no_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message as it is, but for tool_calls of none: with any transformers drops the message's content."""
    if message.get("tool_calls"):
        return message
    return {name: value for name, value in message.items() if name != "tool_calls"}


def tokens_of(biases: Any) -> dict[tuple[int, ...], float]:
    """{tokens: bias} of a sequence_bias: an object by tuples, or in JSON a list such as [[[5], -3.0]].

    Raises:
        TypeError, ValueError: it is neither.
    """
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    return {tuple(tokens): float(bias) for tokens, bias in pairs}


def check_settings(body: Mapping[str, Any], processor: Any = None) -> None:
    """Look at a request's fields.

    Args:
        body: the request.
        processor: the model's, or its tokenizer.

    Raises:
        RequestError: a field is of the wrong kind, no text, or out of range.
    """
    for field, value in body.items():
        if HALF_A_PAIR.search(json.dumps(value, ensure_ascii=False)):
            raise RequestError(f"{field} has half a surrogate pair, which is no character.", field)
    check_numbers(body)
    if (text := body.get("generation_config")) is not None:
        _check_generation_config(text)
    if not _are_objects(body.get("tools")):
        raise RequestError("tools must be a list of objects.", "tools")
    for field in _TEXTS:
        if not isinstance(body.get(field), str | None):
            raise RequestError(f"{field} must be a string.", field)
    if not isinstance(body.get("parallel_tool_calls"), bool | None):
        raise RequestError("parallel_tool_calls must be true or false.", "parallel_tool_calls")
    kwargs = body.get("chat_template_kwargs")
    if kwargs is not None and (wrong := wrong_template_kwargs(kwargs, processor)):
        raise RequestError(f"chat_template_kwargs {wrong}", "chat_template_kwargs")
    _check_stops(body.get("stop"), "stop")
    bias = body.get("logit_bias")
    if bias is not None and not _is_bias(bias):
        raise RequestError("logit_bias must be an object of numbers by ids of tokens.", "logit_bias")


def _check_generation_config(text: Any) -> None:
    """Raises RequestError where settings in a string are none, out of range, or not a request's to set."""
    try:
        settings = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        told = "generation_config must be a string that holds a JSON object of settings."
        raise RequestError(told, "generation_config")
    check_numbers(settings)
    if wrong := wrong_settings(settings):
        raise RequestError(wrong, "generation_config")
    _check_stops(settings.get("stop_strings"), "generation_config")


def _check_stops(stop: Any, field: str) -> None:
    """Raises RequestError where strings that end an answer are none, or too long or many to be looked for."""
    stops = stop if isinstance(stop, list) else [stop]
    if stop is None:
        return
    if not all(isinstance(one, str) and one for one in stops):
        raise RequestError("stop must be a string or a list of strings, none of them empty.", field)
    if len(stops) > _MOST_STOPS or max(map(len, stops), default=0) > _LONGEST_STOP:
        limits = f"at most {_MOST_STOPS} strings of at most {_LONGEST_STOP} characters"
        raise RequestError(f"stop may be {limits}, got {len(stops)}, {max(map(len, stops))} long.", field)


def _is_bias(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    are_numbers = all(type(one) in (int, float) and abs(one) <= _MOST for one in value.values())
    return are_numbers and all(isinstance(token, str) and token.isdecimal() for token in value)


def check_numbers(body: Mapping[str, Any]) -> None:
    """Raises RequestError where a field that has to be a number is something else, or out of range."""
    for field in _COUNTS:
        value = body.get(field)
        if value is not None and (type(value) is not int or value < 1):
            raise RequestError(f"{field} must be a whole number of at least 1, got {value!r:.40}.", field)
    for field, (may_be, words) in _NUMBERS.items():
        value = body.get(field)
        if value is not None and not (type(value) in (int, float) and may_be(value)):
            raise RequestError(f"{field} must be a number, {words}, got {value!r:.40}.", field)
    seed = body.get("seed")
    if seed is not None and not (type(seed) is int and seed in _SEEDS):
        raise RequestError(f"seed must be a whole number of 64 bits, got {seed!r:.40}.", "seed")
