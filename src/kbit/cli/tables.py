"""Tables that stay readable: whole in a file or a pipe, squeezed into a terminal without breaking numbers."""

from __future__ import annotations

from rich import box
from rich.table import Table
from rich.text import Text

from kbit.cli.consoles import Console

# Wider than any table.
_UNLIMITED = 10_000
# Characters that a column keeps whose words may be broken, if it has such long ones.
_FOLDED = 16


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
        _set_widths(table, console.width)
        wanted = Console(width=_UNLIMITED).measure(table).maximum
    Console(width=max(console.width, wanted)).print(table)


def _set_widths(table: Table, width: int) -> None:
    """Give columns the least that they need, and what is left of a width to those that lack least for a line.

    Rich itself takes from the widest columns, whatever their least is, and then drops the last ones.
    """
    for column in table.columns:
        texts = [_plain(column.header), *map(_plain, column.cells)]
        longest = max((len(word) for text in texts for word in text.split()), default=0)
        column.width = min(_FOLDED, longest) if column.overflow == "fold" else longest
    spare = width - Console(width=_UNLIMITED).measure(table).maximum
    lacking = []
    for column in table.columns:
        whole = max((len(line) for cell in column.cells for line in _plain(cell).splitlines()), default=0)
        lacking.append((whole - (column.width or 0), column))
    for lacks, column in sorted(lacking, key=lambda pair: pair[0]):
        more = max(0, min(spare, lacks))
        column.width = (column.width or 0) + more
        spare -= more


def _plain(cell: object) -> str:
    return Text.from_markup(str(cell)).plain
