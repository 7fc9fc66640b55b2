"""The console that commands print on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import rich.console
import rich.progress
from rich.markup import escape

_Item = TypeVar("_Item")


class Console(rich.console.Console):
    """rich's, but for its emoji: `:smile:` in a path is a part of that path."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of rich's."""
        super().__init__(emoji=False, **options)


def warn(message: str, console: Console | None = None) -> None:
    """Print a warning: on stderr, or on a console."""
    text = f"[yellow]warning:[/yellow] {escape(message)}"
    (console or Console(stderr=True)).print(text, soft_wrap=True, highlight=False)


def tracked(items: Iterable[_Item], description: str) -> Iterable[_Item]:
    """Items with a progress bar on stderr while they are taken: stdout is for results."""
    console = Console(stderr=True)
    return rich.progress.track(items, description, console=console, transient=True)
