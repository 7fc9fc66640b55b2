"""Tables on terminals of any width: no column is lost, no number broken, nothing wider than it has to be."""

from __future__ import annotations

import io

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kbit.bench.text_table import text_table
from kbit.cli import tables
from kbit.cli.consoles import Console

NAME = "a_kernel_of_a_long_name_with_bits_4_and_bf16"
HEADERS = ("kernel", "us", "calls", "per cent of a step", "note")
ROWS = ((NAME, "12345.6", "12.0", "33.3 %", "reads x twice"), (NAME, "1.0", "2.0", "0.1 %", "\u2014"))


def shown(width, monkeypatch, terminal=True, overflow="fold"):
    table = text_table("where a step goes", HEADERS, left=("kernel", "note"), overflow=overflow)
    for row in ROWS:
        table.add_row(*row)
    out = io.StringIO()

    def console(width=width, **more):
        return Console(width=width, file=out, force_terminal=terminal, color_system=None, **more)

    monkeypatch.setattr(tables, "Console", console)
    tables.show(table)
    return out.getvalue().splitlines()


@settings(max_examples=40, deadline=None)
@given(st.integers(20, 140))
def test_every_cell_is_there(width):
    with pytest.MonkeyPatch.context() as monkeypatch:
        lines = shown(width, monkeypatch)
    text = "\n".join(lines)
    assert all(number in text for row in ROWS for number in row[1:3])
    assert all(word in text for word in ("33.3", "twice", "note"))
    folded = "".join(line[1:].split(" ")[0] for line in lines if line.startswith((" ", "│")))
    assert NAME in folded.replace("│", "") or NAME in text
    assert max(map(len, lines)) <= max(width, 62)


def test_what_is_no_terminal_gets_tables_as_wide_as_they_are(monkeypatch):
    assert any(NAME in line and "reads x twice" in line for line in shown(30, monkeypatch, terminal=False))
