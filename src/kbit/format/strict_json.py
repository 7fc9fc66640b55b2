"""JSON that is not trusted: headers of checkpoints, their indexes and configs, tables of measurements."""

from __future__ import annotations

import json
from typing import Any


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a key occurs twice")
    return names


def _reject_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def parse_json(raw: bytes, not_finite: bool = False) -> Any:
    """Parse JSON strictly: UTF-8, no repeated keys, no half of a surrogate pair.

    Args:
        raw: the text.
        not_finite: allow NaN and Infinity, which Python writes though JSON has neither; configs of
            transformers may hold them.

    Raises:
        ValueError: it is not that.
    """
    constant = None if not_finite else _reject_constant
    try:
        text = raw.decode("utf-8")
        content = json.loads(text, object_pairs_hook=_reject_duplicates, parse_constant=constant)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(content, ensure_ascii=False).encode("utf-8")  # raises where half of a pair is escaped
        return content
    except RecursionError:
        raise ValueError("nested too deeply") from None
