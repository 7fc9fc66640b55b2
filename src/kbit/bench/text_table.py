"""Tables for the terminal: words to the left, figures to the right, a line between groups of rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from rich.table import Table

Row = TypeVar("Row")


def text_table(title: str | None, headers: Iterable[str], left: Collection[str] = (), **column: Any) -> Table:
    """A table without rows.

    Args:
        title: above it.
        headers: of its columns.
        left: headers of the columns that hold words; the others hold figures.
        column: what `rich.table.Table.add_column` takes besides, for every column.
    """
    table = Table(title=title)
    for header in headers:
        table.add_column(header, justify="left" if header in left else "right", **column)
    return table


def in_sections(table: Table, rows: Iterable[Row], key: Callable[[Row], object]) -> Iterator[Row]:
    """The rows, to be added one after the other; where their key changes, the table gets a line."""
    for _, group in itertools.groupby(rows, key):
        table.add_section()
        yield from group
