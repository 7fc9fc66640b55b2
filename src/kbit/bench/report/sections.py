"""What a section of the report is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kbit.bench.report.results import Result


@dataclass(frozen=True)
class Section:
    """A part of the page. `render` gets the results of its `kinds` and gives HTML, or "" if they hold nothing
    for it; then the section says that it is absent, and which `command` makes its files.
    """

    anchor: str
    title: str
    about: str
    kinds: Sequence[str]
    command: str
    render: Callable[[Sequence[Result]], str]
