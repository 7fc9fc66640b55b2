"""`kbit generate` in a pipe."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation import GenerationMixin
from typer.testing import CliRunner

from kbit.cli import app
from kbit.cli.generate import encode_prompt, generate
from tiny_models import build_with_tokenizer


def test_a_prompt_from_stdin_is_answered_as_that_of_an_argument(tmp_path: Path) -> None:
    command = ["generate", str(build_with_tokenizer("llama", tmp_path)), "--max-new-tokens", "4"]
    given = CliRunner().invoke(app, [*command, "w1 w2 w3"])
    read = CliRunner().invoke(app, [*command, "-"], input="w1 w2 w3\n")
    assert (given.exit_code, read.exit_code) == (0, 0), read.output
    assert read.stdout == given.stdout
    nothing = CliRunner().invoke(app, [*command, "-"], input="\n")
    assert str(nothing.exception) == "the prompt '' has no tokens. Give it some words."


def changed(folder: Path, name: str, **fields: object) -> None:
    """Set fields of a file of JSON."""
    file = folder / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | fields))


def test_answers_end_with_the_models_positions(tmp_path: Path) -> None:
    folder = build_with_tokenizer("llama", tmp_path)
    changed(folder, "config.json", max_position_embeddings=8)
    ran = CliRunner().invoke(app, ["generate", str(folder), "--no-chat", "w1 w2 w3"])
    assert ran.exit_code == 0, ran.output
    ran = CliRunner().invoke(app, ["generate", str(folder), "--no-chat", "w1 " * 20])
    assert "tokens, and the model knows 8 positions" in str(ran.exception)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    folder = build_with_tokenizer("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(6)
    model.save_pretrained(folder)
    text = tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w9")
    for command in (["generate", str(folder), text.read_text()], ["eval", str(folder), "--text", str(text)]):
        ran = CliRunner().invoke(app, command)
        assert "its model knows 6. Fetch the tokenizer of this model." in str(ran.exception), ran.output


def test_how_tokens_are_drawn(tmp_path: Path, monkeypatch) -> None:
    folder, given = build_with_tokenizer("llama", tmp_path), []
    changed(folder, "generation_config.json", num_beams=3, num_return_sequences=2)
    generate = GenerationMixin.generate
    monkeypatch.setattr(
        GenerationMixin,
        "generate",
        lambda *args, **named: given.append(named) or generate(*args, **named),
    )
    command = ["generate", str(folder), "w1 w2", "--max-new-tokens", "2"]
    for options, top_k in (([], None), (["--temperature", "1"], None), (["--temperature=1", "--top-k=0"], 0)):
        ran = CliRunner().invoke(app, [*command, *options])
        assert ran.exit_code == 0, ran.output
        assert given[-1].get("top_k") == top_k
        assert given[-1]["do_sample"] == bool(options)
        assert given[-1]["tokenizer"].vocab_size > 0  # for strings that end an answer
    assert "--top-k is for sampling" in str(CliRunner().invoke(app, [*command, "--top-k", "5"]).exception)


def test_closed_standard_input(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(ValueError, match="standard input, which is closed"):
        generate(tmp_path, "-")


IN_PARTS = """{% for m in messages %}{% for part in m['content'] %}{% if part['type'] == 'text' %}
{{ part['text'] }} {% endif %}{% endfor %}{% endfor %}"""


@pytest.mark.parametrize("template", [IN_PARTS, "{% for m in messages %}{{ m['content'] }} {% endfor %}"])
def test_templates_that_want_content_in_parts(template: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_with_tokenizer("llama", tmp_path))
    tokenizer.chat_template = template
    ids = encode_prompt(tokenizer, "w3 w4", "w5", True)
    assert tokenizer.decode(ids[0]).split() == ["w5", "w3", "w4"]


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0]['content'] + 1 }}", "{% for %}"])
def test_templates_that_fail(template: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_with_tokenizer("llama", tmp_path))
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=r"chat template cannot be used: .* or use --no-chat"):
        encode_prompt(tokenizer, "w3", None, True)


def test_named_templates_alone(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(build_with_tokenizer("llama", tmp_path))
    tokenizer.chat_template = {"rag": IN_PARTS}
    with pytest.raises(ValueError, match=r"chat template cannot be used: .* or use --no-chat"):
        encode_prompt(tokenizer, "w3 w4", None, True)


def test_no_spinner_is_on_the_line_of_a_bar(tmp_path: Path, monkeypatch) -> None:
    module = sys.modules["kbit.cli.generate"]
    monkeypatch.setattr(module.console, "status", lambda *_: pytest.fail("transformers shows a bar"))
    ran = CliRunner().invoke(
        app, ["generate", str(build_with_tokenizer("llama", tmp_path)), "w1", "--top-p=1"]
    )
    assert ran.exit_code == 0, ran.output
