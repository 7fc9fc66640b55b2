"""`kbit bench` in tests: runs of its commands, and their outcome."""

from __future__ import annotations

from typer.testing import CliRunner

from kbit.cli import app


def run(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def refuse(*arguments: object) -> str:
    """The message of a run that must fail with one of the errors that the command line turns into a line."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, ValueError | OSError | ImportError), repr(result.exception)
    return str(result.exception)
