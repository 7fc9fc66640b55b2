"""`kbit quantize` in tests: runs of it, their outcome, and sources made for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kbit.cli import app
from kbit.integrations.streaming import folder as work_folder

# Bytes at which a shard is full, so that a tiny model has many.
SMALL_SHARD = 5_000


def run(*arguments: object):
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def refuse(*arguments: object) -> str:
    """The message of a run that must fail with one of the errors that the command line turns into a line."""
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, ValueError | OSError), result.exception
    return str(result.exception)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def fail_at(monkeypatch, call: int, error: Exception):
    real, calls = work_folder.save_file, []

    def save(tensors, path, metadata=None):
        calls.append(path)
        if len(calls) == call:
            Path(path).write_bytes(b"half")
            raise error
        real(tensors, path, metadata=metadata)

    monkeypatch.setattr(work_folder, "save_file", save)


def altered(source: Path, folder: Path, change) -> Path:
    """A copy of a model whose config and tensors have been changed by `change(config, tensors)`."""
    shutil.copytree(source, folder)
    config, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
