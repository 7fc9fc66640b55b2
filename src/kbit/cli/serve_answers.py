"""What transformers' server finds in an answer, tool calls and reasoning: in generated text alone.

It parses an answer by a template, from where the prompt begins it: a chat template may write its first words.
Where a prompt has no such place, all of it would be parsed, a user's tool calls too. A tool call that is cut
off or malformed would end in an error, which costs the client the whole answer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

_CHAT = "Hello"
_NOWHERE = "(?!)"  # a pattern that nothing matches
_CALLS = "tool_calls"  # transformers' field for them
_LOOSE = ("xml-inline", "kv-lines")  # contents that are parsed as far as they go: JSON is whole or none


def parse_answers_alone() -> None:
    """Have answers parsed without their prompts, and what cannot be parsed stay as it is, as text."""
    from transformers.cli.serving import chat_completion, response, utils
    from transformers.utils.chat_parsing.response_parser import ResponseParser
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

    ResponseParser._close_current = _unless_cut_off(ResponseParser._close_current)
    ResponseTemplate.truncate_past_last_anchor = _or_nothing(ResponseTemplate.truncate_past_last_anchor)
    utils.get_response_template = _begun_by_chats(utils.get_response_template)
    utils._normalize_tool_call = _of_text(utils._normalize_tool_call)
    utils.ResponseParser = _lenient()
    for module in (chat_completion, response):
        module.parse_assistant_message = _at_any_rate(module.parse_assistant_message)


def _or_nothing(cut: Callable[..., str]) -> Callable[..., str]:
    """A template's method to find the answer's beginning in a prompt, which is empty where there is none."""

    @functools.wraps(cut)
    def cut_or_nothing(self: Any, text: str) -> str:
        return cut(self, text) if self.start_anchor_re.search(text) else ""

    return cut_or_nothing


def _begun_by_chats(find: Callable[..., Any]) -> Callable[..., Any]:
    """The server's function to find a model's template, which begins nowhere if chats begin otherwise.

    What a user writes could else be taken for the beginning of an answer.
    """

    @functools.wraps(find)
    def found(processor: Any, model: Any) -> Any:
        template = find(processor, model)
        if template is None or _begins(processor, template):
            return template
        rest = {name: value for name, value in template.items() if name != "start_anchor"}
        return rest | {"start_anchor_pattern": _NOWHERE}

    return found


def _begins(processor: Any, template: Any) -> bool:
    """Whether the chat template ends a prompt with what the template for answers looks for.

    Of a longer prompt it is then the last such place, whatever else its messages contain.
    """
    from transformers.utils.chat_parsing.response_templates import load_response_template

    chat = [{"role": "user", "content": _CHAT}]
    try:
        prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception:  # whatever a template raises of a chat that it does not take
        return False
    return load_response_template(template).start_anchor_re.search(prompt.rpartition(_CHAT)[2]) is not None


def _of_text(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The server's function to read one tool call.

    Raises:
        ValueError: it has no name, or characters that JSON cannot have.
    """

    @functools.wraps(read)
    def call(value: Any) -> Any:
        found = read(value)
        if not isinstance(found.name, str):
            raise ValueError(f"a tool's name must be a string, got {found.name!r:.40}")
        (found.name + found.arguments).encode()  # raises for half a surrogate pair
        return found

    return call


def _unless_cut_off(close: Callable[..., None]) -> Callable[..., None]:
    """The parser's method to close a region, which raises ValueError for a tool call that lacks its end."""

    @functools.wraps(close)
    def closed(self: Any, events: list[Any]) -> None:
        field = self._spec.fields.get(self._current)
        if self._opened and field.name == _CALLS and field.content in _LOOSE and field.close_re is not None:
            ends = [found.end() for found in field.close_re.finditer(self._buffer)]
            if self._pos not in ends:
                raise ValueError("a tool call is cut off")
        close(self, events)

    return closed


def _at_any_rate(parse: Callable[..., Any]) -> Callable[..., Any]:
    """The server's function to parse an answer, where what cannot be parsed is text, as in a stream."""

    @functools.wraps(parse)
    def parsed(
        processor: Any,
        model: Any,
        generated_ids: Any,
        input_ids: Any,
        cleaned_content: str = "",
        **tools: Any,  # none in older versions of transformers
    ) -> tuple[str, str | None, list[Any] | None]:
        with contextlib.suppress(Exception):
            return parse(processor, model, generated_ids, input_ids, cleaned_content, **tools)
        with contextlib.suppress(Exception):
            return _in_parts(processor, model, generated_ids, input_ids, **tools)
        return cleaned_content, None, None

    return parsed


def _in_parts(
    processor: Any, model: Any, generated_ids: Any, input_ids: Any, **tools: Any
) -> tuple[str, str | None, list[Any] | None]:
    """An answer's content, reasoning and tool calls, as they would be streamed."""
    from transformers.cli.serving.utils import (
        ReasoningText,
        ToolCall,
        build_response_parser,
        response_events_to_chunks,
    )

    parser: Any = build_response_parser(processor, model, input_ids, **tools)
    text = getattr(processor, "tokenizer", processor).decode(generated_ids)
    parts = response_events_to_chunks([*parser.initial_events, *parser.feed(text), *parser.finalize()[1]])
    calls = [part for part in parts if isinstance(part, ToolCall)]
    reasoning = "".join(part for part in parts if isinstance(part, ReasoningText)).strip()
    content = "".join(part for part in parts if not isinstance(part, ReasoningText | ToolCall)).strip()
    return content, reasoning or None, calls or None


@functools.cache
def _lenient() -> Any:
    """transformers' parser, for streams: what it cannot parse are events of text, without errors."""
    from transformers.cli.serving import utils
    from transformers.utils.chat_parsing.content_parsers import STREAMABLE_PARSERS
    from transformers.utils.chat_parsing.response_parser import ResponseParser

    class Lenient(ResponseParser):
        _began = 0  # where the open region did, in the buffer

        def _open_explicit(self, events: list[Any], field: Any, m: Any) -> None:
            self._began = m.start()
            super()._open_explicit(events, field, m)

        def _close_current(self, events: list[Any]) -> None:
            name, before = self._current, len(events)
            try:
                super()._close_current(events)
                if name == _CALLS and events[before:]:
                    events[before:] = _one_by_one(events[before], utils._normalize_tool_call)
            except Exception:
                del events[before:]
                self._reset_to_implicit()
                if self._spec.fields[name].content not in STREAMABLE_PARSERS:  # others are sent already
                    text = self._without_end(self._buffer[self._began : self._pos])
                    events.append({"type": "region_chunk", "field": "content", "text": text, "dirty": False})

        def _without_end(self, text: str) -> str:
            """Without the tokens that end an answer."""
            field = self._spec.fields.get(self._implicit_name)
            end = field and field.close_re
            return end.sub("", text) if end else text

        def finalize(self) -> tuple[dict[str, Any], list[Any]]:
            events: list[Any] = []
            self._process(events, eos=True)
            self._finalized = True
            return self._output, events  # whatever fields are missing

    return Lenient


def _one_by_one(event: dict[str, Any], read: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """The event that closes a region of tool calls, for each of them; raises what `read` does."""
    values = event["value"] if isinstance(event["value"], list) else [event["value"]]
    for value in values:
        read(value)
    return [{**event, "value": value} for value in values]
