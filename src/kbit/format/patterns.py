"""Regular expressions of overrides, searched in bounded time, for they may come from a stranger's config.

Python's matcher tries every way to split a name among the repeats of a pattern. For repeats one after another
these are polynomially many; for a repeat inside another, or a choice inside a repeat, exponentially many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

# Ways to match that are worth trying, at about 10 ns each: those of a pattern, and of all together.
MOST_WAYS, MOST_WAYS_OF_ALL = 20_000_000, 100_000_000
_TOKEN = re.compile(
    r"""(?P<nothing> \(\?\#[^)]*\) | \(\?[aiLmsu]+\) )
    | (?P<literal> \\. | \[\^?\]?(?:\\.|[^\]\\])*\] )
    | (?P<verbose> \(\?[aiLmsu-]*x )
    | (?P<open> \(\?? ) | (?P<close> \) ) | (?P<bar> \| )
    | (?P<quantifier> (?: [*+?] | \{ (?: \d+(?:,\d*)? | ,\d* ) \} ) [?+]? )
    | (?P<other> . )""",
    re.VERBOSE | re.DOTALL,
)

# Compared letter by letter, wherever it is tried.
_REFERENCE = re.compile(r"\\[1-9]|\(\?P=|\(\?\(")

# A policy may state every module of a large model, and all are looked for, in their order, for each name. Of
# the few that `re` keeps by itself none would be there when its turn comes again.
_KEPT = 65_536
_compiled = lru_cache(maxsize=_KEPT)(re.compile)


def check(pattern: str) -> None:
    """Check that a pattern can be searched for.

    Raises:
        ValueError: it is no regular expression, repeats what holds a choice, refers to a group, or uses the
            verbose syntax.
    """
    if not isinstance(pattern, str):
        raise ValueError(f"overrides: {pattern!r} is not a regular expression: it is no string.")
    try:
        _compiled(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"overrides: {pattern[:80]!r} is not a regular expression: {error}.") from None
    _choices(pattern)


def first_found(patterns: Iterable[str], names: Sequence[str]) -> str | None:
    """The first pattern that `re.search` finds in a name; all have passed `check`.

    Raises:
        ValueError: there may be too many ways to match names so long.
    """
    tried = 0
    for pattern, name in product(patterns, names):
        tried += _ways(pattern, name)
        if tried > MOST_WAYS_OF_ALL:
            raise ValueError(
                f"overrides: there are too many with repeats or alternatives to look for them all in "
                f"{name[:80]!r}. Write names out."
            )
        if _compiled(pattern).search(name):
            return pattern
    return None


def is_found(pattern: str, name: str) -> bool:
    """What `re.search` finds; `pattern` has passed `check`.

    Raises:
        ValueError: there may be too many ways to match a name so long.
    """
    _ways(pattern, name)
    return _compiled(pattern).search(name) is not None


def _ways(pattern: str, name: str) -> int:
    """How many ways to match a name the matcher may try; ValueError if these are too many."""
    repeats, others = _choices(pattern)
    ways = math.comb(len(name) + repeats + 1, repeats + 1) * others
    if ways > MOST_WAYS:
        raise ValueError(
            f"overrides: {pattern[:80]!r} has too many repeats or alternatives to look for it in "
            f"{name[:80]!r}. Write names out, or make several overrides of it."
        )
    return ways


@lru_cache(maxsize=_KEPT)
def _choices(pattern: str) -> tuple[int, int]:
    """(repeats, ways) of a legal pattern: its repeats, at most 64 of them counted, and the ways beside those.

    Ways are the product of the alternatives and of the least counts of groups: a group that matches nothing
    is tried that often.
    """
    repeats, ways = 0, 1
    alternatives, chooses = [1], [False]  # of each open group, the whole pattern first
    closed = False  # just now, a group with a choice in it
    grouped = False  # just now, a group
    for token in _TOKEN.finditer(pattern):
        kind, text = token.lastgroup, token.group()
        if kind == "nothing":  # what follows repeats what is in front of it
            continue
        if kind == "verbose" or (closed and kind == "quantifier" and text[0] != "?"):
            what = "has the flag x" if kind == "verbose" else "repeats a group that has a repeat or | in it"
            raise ValueError(
                f"overrides: {pattern[:80]!r} {what}; looking for it could take forever. Write it without."
            )
        if _REFERENCE.match(pattern, token.start()):
            raise ValueError(
                f"overrides: {pattern[:80]!r} refers to a group; looking for it could take forever. Write it "
                f"without."
            )
        least = re.match(r"\{(\d+)", text) if grouped and kind == "quantifier" else None
        if least:
            ways *= max(1, int(least[1]))
        closed = kind == "close" and chooses[-1]
        grouped = kind == "close"
        if kind == "open":
            alternatives.append(1)
            chooses.append(False)
        elif kind == "close":
            ways *= alternatives.pop()
            chooses[-2:] = [chooses[-2] or closed]
        elif kind == "bar":
            alternatives[-1] += 1
            chooses[-1] = True
        elif kind == "quantifier" and not re.match(r"\{\d+\}", text):
            chooses[-1] = True
            repeats, ways = (repeats, 2 * ways) if text[0] == "?" else (repeats + 1, ways)
    return min(repeats, 64), ways * alternatives[0]


def in_order(overrides: Any) -> dict[str, int]:
    """Overrides as a dictionary, from one or from what `for_json` gives.

    Raises:
        TypeError: it is neither.
        ValueError: a pair's expression was there before.
    """
    if overrides is None or isinstance(overrides, Mapping):
        return dict(overrides or {})
    if not isinstance(overrides, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in overrides
    ):
        raise TypeError(f"overrides must map regular expressions to bits, got {overrides!r}.")
    found: dict[str, int] = dict(overrides)
    if len(found) < len(overrides):
        raise ValueError(f"overrides have an expression twice: {overrides!r}.")
    return found


def for_json(overrides: Mapping[str, int]) -> dict[str, int] | list[list[str | int]]:
    """Overrides as a config has them; pairs where transformers, which sorts keys, would lose the order."""
    if list(overrides) == sorted(overrides):
        return dict(overrides)
    return [[pattern, bits] for pattern, bits in overrides.items()]
