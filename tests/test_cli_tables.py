"""Tables on terminals of any width: no column is lost, no number broken, nothing wider than it has to be.

And helps: arguments in capitals, no command's line cut, sentences for options.
"""

from __future__ import annotations

import io

import hypothesis.strategies as st
import pytest
import typer.main
from hypothesis import given, settings
from typer.testing import CliRunner

from kbit.bench.text_table import text_table
from kbit.cli import app, tables
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


COMMANDS = typer.main.get_command(app).commands
ALL = COMMANDS | {f"bench {name}": command for name, command in COMMANDS["bench"].commands.items()}


def test_no_line_about_a_command_is_cut():
    for arguments in (["--help"], ["bench", "--help"]):
        output = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).output
        lines = output[output.index("Commands:") :].split("\n\n")[0].splitlines()[1:]
        assert all(line.endswith(".") and "..." not in line and len(line) <= 80 for line in lines), output


@pytest.mark.parametrize("name", [name for name in ALL if name != "bench"])
def test_helps_of_arguments_and_options(name):
    usage = CliRunner().invoke(app, [*name.split(), "--help"]).output.splitlines()[0]
    for parameter in ALL[name].params:
        if parameter.param_type_name == "argument":
            assert parameter.metavar.isupper()
            assert parameter.metavar in usage
        words = getattr(parameter, "help", None) or ""
        assert words.endswith((".", "...")), (name, parameter.name)
        assert not words.startswith(("Of ", "Not ")), (name, parameter.name)
        if getattr(parameter, "secondary_opts", ()):  # a --no- that is the default says nothing
            assert parameter.default is True, (name, parameter.name)


def test_what_is_no_terminal_gets_tables_as_wide_as_they_are(monkeypatch):
    assert any(NAME in line and "reads x twice" in line for line in shown(30, monkeypatch, terminal=False))
