"""The console that commands print on."""

from __future__ import annotations

from typing import Any

import rich.console


class Console(rich.console.Console):
    """rich's, but for its emoji: `:smile:` in a path is a part of that path."""

    def __init__(self, **options: Any) -> None:
        """`options`: those of rich's."""
        super().__init__(emoji=False, **options)
