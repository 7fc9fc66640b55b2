"""Options of `kbit serve` that are of no use are told before a model is loaded."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from kbit.cli import app
from tiny_models import build_with_tokenizer


@pytest.fixture
def serve(monkeypatch):
    """Runs the command with options; what is served, and what was raised."""
    served = []
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda given, *_: served.append(given[1:]))

    def run(*options, model="org/model"):
        return served, str(CliRunner().invoke(app, ["serve", str(model), *options]).exception)

    return run


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port", "-1"], "--port must be from 0 to 65535, got -1."),
        (["--port", "70000"], "--port must be from 0 to 65535, got 70000."),
        (["--host"], "--host needs a value: --host localhost, for one."),
        (["--port=0", "--log-level", "bogus"], "--log-level takes detail, debug, info, warning, error or "),
        (["--port=0", "--chat-template-kwargs", "{bad"], "--chat-template-kwargs must be JSON: "),
        (["--port=0", "--chat-template-kwargs=5"], "--chat-template-kwargs must be an object"),
        (
            ["--port=0", "--chat-template-kwargs", '{"tokenize": false}'],
            "--chat-template-kwargs may not name tokenize: they are for what only the template takes.",
        ),
        (
            ["--port=0", "--chat-template-kwargs", '{"padding": "max_length", "max_length": 9}'],
            "--chat-template-kwargs may not name max_length, padding: they",
        ),
        (["--port=0", "--device", "0"], "no device '0'. Use auto, cpu, cuda or cuda:1."),
        (["--port=0", "--device=cuda:x"], "no device 'cuda:x'. Use auto"),
        (["--port=0", "--device=meta"], "no device 'meta'. Use auto"),
    ],
)
def test_values_of_no_use(options, told, serve):
    served, said = serve(*options)
    assert said.startswith(told)
    assert not served


@pytest.mark.parametrize(
    "options",
    [
        ["--port", "0", "--log-level", "INFO"],
        ["--port", "0", "--chat-template-kwargs", '{"enable_thinking": false}'],
        ["--port", "0", "--device", "balanced"],
        ["--port", "0", "--device", "mps"],
    ],
)
def test_values_that_are_handed_over(options, serve):
    served, said = serve(*options)
    assert served == [options], said


@pytest.mark.parametrize("text", ["[]", '{"max_new_tokens": "x"}'])
@pytest.mark.parametrize("command", ["serve", "generate", "eval"])
def test_settings_of_the_model_that_are_none(command, text, serve, tmp_path):
    folder = build_with_tokenizer("llama", tmp_path)
    (folder / "generation_config.json").write_text(text)
    if command == "serve":
        served, said = serve("--port=0", model=folder)
        assert not served
    else:
        (tmp_path / "text").write_text("w1 w2 w3 w4 " * 50)
        rest = {"generate": ("w1", "--max-new-tokens", "2"), "eval": ("--text", str(tmp_path / "text"))}
        said = str(CliRunner().invoke(app, [command, str(folder), *rest[command]]).exception)
    assert said.startswith(f"{folder / 'generation_config.json'} cannot be used: TypeError: ")
    assert "remove it" in said


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--port=0", "--max-tokens", "5"], "Error: No such option"),
        (["--port", "x"], "Error: Invalid value for '--port': 'x' is not a valid int"),
        (["other", "--port=0"], "Error: Got unexpected extra argument"),
    ],
)
def test_usage_errors_are_short(options, told, serve):
    served, _ = serve()
    served.clear()
    result = CliRunner().invoke(app, ["serve", "org/model", *options])
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[0].endswith(" serve [OPTIONS] {MODEL}")
    assert lines[3].startswith(told)
    assert lines[4:] == ["`transformers serve --help` lists all options."]
    assert not served


def test_settings_of_the_model_that_transformers_does_without(serve, tmp_path):
    folder = build_with_tokenizer("llama", tmp_path)
    file = folder / "generation_config.json"
    for text in ("{bad", json.dumps({"temperature": 0.5}), None):
        file.write_text(text) if text else file.unlink()
        served, said = serve("--port=0", model=folder)
        assert served.pop() == ["--port=0"], said
