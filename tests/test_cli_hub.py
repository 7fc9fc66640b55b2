"""Models by their names on the hub: found in its cache, fetched, and what is said where neither works."""

from __future__ import annotations

import importlib
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from typer.testing import CliRunner

from kbit.cli import app, hub
from tiny_models import build_with_tokenizer

NAME, COMMIT = "org/tiny-model", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which is not asked."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_with_tokenizer("llama", tmp_path_factory.mktemp("models") / "in")


def succeed(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


def refuse(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 1, result.output
    return str(result.exception)


def store(folder: Path, cache: Path) -> Path:
    """Put a model into the cache as the hub's library does: links to files of other names."""
    kept = cache / "models--org--tiny-model"
    snapshot = kept / "snapshots" / COMMIT
    for place in (snapshot, kept / "refs", kept / "blobs"):
        place.mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copy(file, kept / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_commands_take_names(model: Path, cache: Path, tmp_path: Path) -> None:
    snapshot, out, again = store(model, cache), tmp_path / "out", tmp_path / "again"
    succeed("quantize", NAME, out, "--json", tmp_path / "run.json")
    assert f'"model": "{NAME}"' in (tmp_path / "run.json").read_text()
    assert not any(file.is_symlink() for file in out.iterdir())
    succeed("quantize", f"{NAME}@{COMMIT}", again)
    assert (again / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    succeed("generate", NAME, "w1 w2", "--max-new-tokens", 2)
    assert f"{NAME} (reference)" in succeed("eval", out, "--reference", NAME, "--text", text_in(tmp_path))
    assert NAME in succeed("inspect", NAME)
    assert "SQNR" in succeed("inspect", out, "--source", NAME)
    assert NAME in succeed("profile", NAME, "--device", "cpu", "--context", 4, "--steps", 1)
    assert hub.folder_of(snapshot) == snapshot


def text_in(folder: Path) -> Path:
    file = folder / "text.txt"
    file.write_text("w1 w2 w3 w4 w5 w6")
    return file


def test_what_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert hub.folder_of(Path("org/model@v1")) == tmp_path
    assert (asked["name"], asked["revision"]) == ("org/model", "v1")
    files = ["model-1-of-2.safetensors", "tokenizer.model", "1_Pooling/config.json"]
    others = ["modeling.py", "model.bin", "onnx/config.json", "original/model.safetensors"]
    patterns = {name: asked[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*files, *others], **patterns)) == files


@pytest.mark.parametrize("name", ["org/missing", "org/mis sing", "org/-x"])
def test_a_name_that_the_hub_does_not_give(name: str, tmp_path: Path) -> None:
    commands = [("quantize", name, tmp_path / "out"), ("generate", name, "hello")]
    for command in (*commands, ("eval", name), ("inspect", name), ("profile", name)):
        message = refuse(*command)
        assert message.startswith(f"{name} is not a folder here, ")
        if name == "org/missing":
            assert message.endswith(
                "HF_HUB_OFFLINE is set and its cache lacks the model. Unset it to fetch the model."
            )
        else:
            assert "and the Hugging Face Hub did not give a model" in message
            assert message.endswith("Is it spelled right? Models behind a gate need `hf auth login`.")
    assert not (tmp_path / "out").exists()


def http_error() -> Exception:
    """One of the library, httpx or httpx2, by which that of the hub speaks."""
    library = importlib.import_module("httpx2" if find_spec("httpx2") else "httpx")
    return library.ReadTimeout("slow")


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("a long story"), ConnectionError(), http_error()])
def test_a_hub_that_cannot_be_reached(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert refuse("inspect", "org/model") == (
        "org/model is not a folder here, the hub cannot be reached and its cache lacks the model. "
        "Check the connection."
    )


def test_paths_are_not_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    for path in ("a/b", "a/b/c", "missing", "../c", "/a/b", "~/c"):
        assert "Hub did not" not in refuse("generate", path, "hello"), path


def test_names_of_models(model: Path, cache: Path, tmp_path: Path) -> None:
    assert hub.model_name(store(model, cache)) == NAME
    assert hub.model_name(tmp_path / "snapshots" / "x") == "x"
