"""Pieces of HTML. Whatever is text passes through `escape` here, so sections cannot forget it."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MISSING = "–"
# From this share of the time of 16 bits on, a cell has this colour; the number stands in it, too.
_HEAT = ((2.5, "h4"), (1.5, "h3"), (1.1, "h2"), (1.0, "h1"), (0.95, "l1"), (0.0, "l2"))


@dataclass(frozen=True)
class Cell:
    """Text of a table cell and its CSS class."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Row:
    """Cells; `total` rows are bold, `first` ones have a line above."""

    cells: Sequence[str | Cell]
    total: bool = False
    first: bool = False


def escape(text: object) -> str:
    """Text for HTML, quotes included."""
    return html.escape(str(text), quote=True)


def paragraph(text: str, style: str = "") -> str:
    """A paragraph of plain text; `backquoted` parts are code."""
    parts = escape(text).split("`")
    words = "".join(_code(part) if index % 2 else part for index, part in enumerate(parts))
    return f'<p class="{style}">{words}</p>' if style else f"<p>{words}</p>"


def _code(escaped: str) -> str:
    """Code whose words stay whole where lines break: no line ends in the dashes of an option."""
    words = " ".join(f"<span>{word}</span>" for word in escaped.split(" "))
    return f"<code>{words}</code>"


def heading(text: str) -> str:
    """A heading inside a section."""
    return f"<h3>{escape(text)}</h3>"


def table(headers: Sequence[str], rows: Iterable[Row], caption: str, left: int = 1) -> str:
    """A table in a container that scrolls sideways by itself.

    Args:
        headers: column titles.
        rows: as many cells each; the first names the row.
        caption: what is in it, read out to who cannot see it, too.
        left: columns that are text, and so aligned to the left.
    """
    head = "".join(
        f'<th scope="col"{_class("t" if index < left else "")}>{escape(name)}</th>'
        for index, name in enumerate(headers)
    )
    body = "".join(_row(row, left) for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _row(row: Row, left: int) -> str:
    cells = [cell if isinstance(cell, Cell) else Cell(cell) for cell in row.cells]
    name, *rest = cells
    columns = "".join(
        f"<td{_class('t' if index < left else '', cell.style)}>{escape(cell.text)}</td>"
        for index, cell in enumerate(rest, start=1)
    )
    style = _class("total" if row.total else "", "first" if row.first else "")
    return f'<tr{style}><th scope="row" class="t">{escape(name.text)}</th>{columns}</tr>'


def _class(*names: str) -> str:
    joined = " ".join(filter(None, names))
    return f' class="{joined}"' if joined else ""


def details(summary: str, content: str, opened: bool = False) -> str:
    """Content that folds away."""
    return f"<details{' open' if opened else ''}><summary>{escape(summary)}</summary>{content}</details>"


def heat(ratio: float) -> Cell:
    """A speed-up, coloured by whether it is one."""
    style = next(name for least, name in _HEAT if ratio >= least)
    return Cell(f"{ratio:.2f}", style)


def number(value: float | None, spec: str) -> str:
    """A number, or a dash where there is none."""
    return MISSING if value is None else format(value, spec)


def speed(item: Mapping[str, Any], bandwidth: float) -> list[str]:
    """Microseconds, spread, GB/s and their share of `bandwidth` (GB/s), in percent, of a measured row."""
    share = f"{100 * item['gb_s'] / bandwidth:.0f}"
    return [f"{item['us']:.1f}", f"{100 * item['spread']:.0f}%", f"{item['gb_s']:.0f}", share]


def generic(items: Sequence[Mapping[str, Any]], caption: str) -> str:
    """A table of objects: a column for every key with plain values."""
    keys = [
        key
        for key in dict.fromkeys(key for item in items for key in item)
        if not any(isinstance(item.get(key), dict | list) for item in items)
    ]
    if not keys:
        return ""
    text = {key for key in keys if any(isinstance(item.get(key), str) for item in items)}
    keys.sort(key=lambda key: key not in text)  # stable: text first, in the file's order
    rows = [Row([_plain(item.get(key)) for key in keys]) for item in items]
    return table([key.replace("_", " ") for key in keys], rows, caption, left=max(1, len(text)))


def _plain(value: object) -> str:
    if value is None:
        return MISSING
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def tiles(items: Iterable[tuple[str, str]]) -> str:
    """(number, what it is) pairs in large type."""
    return (
        '<ul class="tiles">'
        + "".join(
            f"<li><strong>{escape(figure)}</strong><span>{escape(text)}</span></li>" for figure, text in items
        )
        + "</ul>"
    )
