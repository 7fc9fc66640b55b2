"""Tables that stay readable: whole in a file or a pipe, squeezed into a terminal without breaking numbers."""

from __future__ import annotations

from rich import box
from rich.table import Column, Table
from rich.text import Text

from kbit.cli.consoles import Console

# Wider than any table.
_UNLIMITED = 10_000
# Characters that a column keeps whose words may be broken.
_FOLDED = 16
# Characters that padding and lines between columns take, at most.
_BETWEEN = 3


def show(table: Table) -> None:
    """Print a table.

    What is no terminal has no width: there it is as wide as it wants. On a terminal that is narrower than
    that it loses its frame, and cells of several words take several lines. Only columns with
    `overflow="fold"` break words; beyond that the terminal wraps whole lines.
    """
    console = Console()
    wanted = Console(width=_UNLIMITED).measure(table).maximum
    if console.is_terminal and wanted > console.width:
        table.box, table.pad_edge, table.padding = box.SIMPLE_HEAD, False, (0, 1, 0, 0)
        for column in table.columns:
            column.min_width = _FOLDED if column.overflow == "fold" else _longest_word(column)
        wanted = sum((column.min_width or 0) + _BETWEEN for column in table.columns)
    Console(width=max(console.width, wanted)).print(table)


def _longest_word(column: Column) -> int:
    texts = [Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells)]
    return max((len(word) for text in texts for word in text.split()), default=0)
