"""`kbit bench plot` of results that lack something: drawn, or one error with the file and its command."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kbit.cli import app

pytest.importorskip("matplotlib")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FILES = {
    "h200-generate-llama-3-8b.json": "kbit bench generate",
    "h200-chat-llama-3-8b.json": "kbit bench chat",
    "h200-profile-qwen3-coder-next.json": "kbit profile",
    "quality-tiny-moe.json": "kbit eval --bits",
}


def damaged(found: Any) -> Iterator[Any]:
    """Copies without a key, or with something else in its place: of the whole, of the first row of a list."""
    places = [[key] for key in found if key != "machine"]
    for key, rows in found.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            places += [[key, 0, inner] for inner in rows[0]]
    for *path, last in places:
        for wrong in (None, {}, 7):
            copied = copy.deepcopy(found)
            into = copied
            for step in path:
                into = into[step]
            if wrong is None:
                del into[last]
            else:
                into[last] = wrong
            yield copied


@pytest.mark.parametrize("name", FILES)
def test_damaged_results_are_one_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *given, **how: None)  # most of the time
    told, file = 0, tmp_path / name
    for found in damaged(json.loads((RESULTS / name).read_text())):
        file.write_text(json.dumps(found))
        ran = CliRunner().invoke(app, ["bench", "plot", str(file), "--out", str(tmp_path)])
        assert ran.exit_code == 0 or isinstance(ran.exception, ValueError), repr(ran.exception)
        told += f"{file} is not a result of `{FILES[name]} --json`" in str(ran.exception)
    assert told > 0
