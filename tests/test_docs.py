"""Every block of code in README.md and docs/ is executed or parsed; pages build without a warning."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import kbit
from docs_blocks import BLOCKS, PAGES, ROOT, blocks, blocks_of, prose_of
from kbit.cli import app
from tiny_models import build

# What `folder` is on a page; elsewhere the tiny Llama.
MODELS = {"moe.md": "qwen3_moe", "training.md": "qwen3_moe", "nvfp4.md": "qwen3_moe"}
# Pages on which it is quantized already.
QUANTIZED = ("serving.md", "training.md")
# Programs that a page may name without our knowing their options.
FOREIGN = {"sudo", "source", "ncu", "hf", "python3", "vllm"}
ENVIRONMENT = re.compile(r"[A-Z_]+=\S*$")
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))


# -- Python --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name == "docs"], ids=lambda page: page.name)
def test_python_blocks_run_in_their_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"folder": tmp_path / "model", "__name__": page.stem}
    mine = [block for block in blocks_of(page) if block.language == "python"]
    if mine:
        model = build(MODELS.get(page.name, "llama"), torch.float32, spread=False)
        if page.name in QUANTIZED:
            kbit.quantize_model(model, kbit.KbitConfig(bits=4))
        model.save_pretrained(names["folder"])
    for block in mine:
        code = compile("\n" * block.line + block.text, str(page), "exec")  # so that tracebacks show the page
        if not block.why:
            exec(code, names)


def test_there_are_blocks_and_their_languages_are_known():
    assert len(BLOCKS) > 50
    assert {block.language for block in BLOCKS} <= {"python", "sh", "json", "text"}
    for page in PAGES:  # an indented block, or a fence that was not understood, would go unseen
        assert "```" not in prose_of(page), page
        commands = r"^ {4,}(kbit|python|make|pip|torchrun|import|from|q =|\.venv/bin/\w+) .*"
        assert not re.search(commands, prose_of(page), re.M), page


@pytest.mark.parametrize("block", blocks("json"), ids=str)
def test_json_blocks_are_json(block):
    json.loads(block.text)


# -- commands ------------------------------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The words of every command, environment assignments dropped."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and ENVIRONMENT.match(words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


def parse_kbit(words: list[str]) -> None:
    """Parse the words after `kbit` as the command line would; it raises where they are wrong."""
    command, path = typer.main.get_command(app), "kbit"
    while hasattr(command, "commands"):
        while words and words[0].startswith("-"):
            known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
            assert words[0] in known, f"{path} has no option {words[0]}"
            words = words[1:]
        assert words, path
        assert words[0] in command.commands, f"{path} has no command {words[0]}"
        command, path, words = command.commands[words[0]], f"{path} {words[0]}", words[1:]
    command.make_context(path, list(words))


def check_script(path: str, words: list[str]) -> None:
    """A script of the repository exists and knows the options."""
    if path == "yours.py":
        return
    text = (ROOT / path).read_text()
    for word in words:
        if word.startswith("--"):
            assert f'"{word.partition("=")[0]}"' in text, f"{path} has no {word}"


def check_serve(words: list[str]) -> None:
    from transformers.cli.transformers import app as transformers

    # A click group since huggingface_hub has a command line of its own, a Typer before.
    group = transformers if hasattr(transformers, "commands") else typer.main.get_command(transformers)
    words = [word for word in words if word != "--cuda-graphs"]  # kbit's own
    group.commands["serve"].make_context("serve", words)


def check(words: list[str]) -> None:
    program, *rest = words
    if program == "python" and rest[:2] == ["-m", "kbit"]:
        program, rest = "kbit", rest[2:]
    if program == "kbit":
        parse_kbit(rest)
        if rest[:1] == ["serve"]:  # which knows its own options alone
            check_serve(rest[1:])
    elif program == "python":
        check_script(rest[0], rest[1:])
    elif program == "torchrun":
        at = next(i for i, word in enumerate(rest) if word.endswith(".py"))
        check_script(rest[at], rest[at + 1 :])
    elif program == "make":
        assert {word for word in rest if "=" not in word} <= TARGETS
    elif program == "pip":
        assert rest[0] == "install"
        for extra in re.findall(r"\[(\w+)\]", " ".join(rest)):
            assert extra in EXTRAS
    else:
        assert program in FOREIGN, f"what is {program}?"


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_commands_and_their_options_exist(block):
    for words in commands(block.text):
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_named_in_prose_exist(page):
    for text in re.findall(r"`(kbit [^`\n]+)`", prose_of(page)):
        command = typer.main.get_command(app)
        for word in text.split()[1:]:
            if not hasattr(command, "commands") or word.startswith("-") or word.isupper():
                break
            command = command.commands[word]


@pytest.mark.parametrize(
    "wrong",
    ["kbit nothing", "kbit quantize IN", "kbit eval OUT --nothing", "kbit bench moe --repeats x", "brew"],
)
def test_wrong_commands_are_found(wrong):
    with pytest.raises(Exception):  # noqa: B017, PT011  (typer's own, whose place depends on its version)
        check(shlex.split(wrong))


# -- pages ---------------------------------------------------------------------------------------------------


@pytest.fixture
def render_docs(monkeypatch):
    """tools/render_docs.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("render_docs")


def test_every_command_has_a_section_and_its_options(render_docs):
    text = (ROOT / "docs" / "cli.md").read_text()
    for name in render_docs.commands():
        heading = f"{'###' if ' ' in name else '##'} {name}\n"
        assert heading in text, (
            f"docs/cli.md has no section for `kbit {name}`: write one, then run make readme"
        )
        assert f"<!-- options {name} -->" in text, f"docs/cli.md lacks the options of `kbit {name}`"


def test_pages_show_the_results_and_the_command_line():
    command = [sys.executable, str(ROOT / "tools" / "render_docs.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_experts_show_their_file_once_there_is_one(render_docs, monkeypatch):
    monkeypatch.setattr(render_docs, "load_if_there", lambda name: {})
    assert "Not measured yet" in render_docs.experts()
    with monkeypatch.context() as patched:
        patched.setattr(render_docs, "RESULTS", Path("/nowhere"))
        assert render_docs.widths() == render_docs.peers() == render_docs.sanitizer() == ""
    row = {"problem": "gu, 8 experts", "bits": 4, "kernel": "kbit", "us": 5.04, "vs_best_16_bit": 1.456}
    rows = [row | {"rows": 1}, row | {"rows": 8, "us": 7.0}, row | {"rows": 8, "kernel": "bmm"}]
    machine = {"gpu": "A GPU", "driver": "1", "cuda": "2", "torch": "3", "commit": "0123456789"}
    monkeypatch.setattr(render_docs, "load_if_there", lambda name: {"machine": machine, "rows": rows})
    text = render_docs.experts()
    assert "A GPU, driver 1, CUDA 2, torch 3, kbit at 0123456." in text
    assert "| gu, 8 experts, k=4 | 5.0 (1.46) | 7.0 (1.46) |" in text
    machine["transformers"] = "5"
    assert "torch 3, transformers 5, kbit at 0123456." in render_docs.experts()


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "changelog.html").is_file()
    pages = " ".join(page.read_text() for page in (tmp_path / "site").rglob("*.html"))
    assert not re.search(r'(?:src|href)="https?://(?!squidfunk|semver)[^"]+\.(?:js|css|woff2?)"', pages)


def test_the_changelog_has_this_version():
    assert f"## {kbit.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_markers_are_known_and_closed(render_docs):
    for page in PAGES:
        opened = re.findall(r"<!-- (?!not run)([^/][^>]*?) -->", page.read_text())
        assert set(opened) <= set(render_docs.SECTIONS), Path(page).name
        assert re.findall(r"<!-- /([^>]*?) -->", page.read_text()) == opened
