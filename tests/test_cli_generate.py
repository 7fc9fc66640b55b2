"""`kbit generate` in a pipe."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from kbit.cli import app
from tiny_models import build_with_tokenizer


def test_a_prompt_from_stdin_is_answered_as_that_of_an_argument(tmp_path: Path) -> None:
    command = ["generate", str(build_with_tokenizer("llama", tmp_path)), "--max-new-tokens", "4"]
    given = CliRunner().invoke(app, [*command, "w1 w2 w3"])
    read = CliRunner().invoke(app, [*command, "-"], input="w1 w2 w3\n")
    assert (given.exit_code, read.exit_code) == (0, 0), read.output
    assert read.stdout == given.stdout
    nothing = CliRunner().invoke(app, [*command, "-"], input="\n")
    assert str(nothing.exception) == "the prompt '' has no tokens. Give it some words."
