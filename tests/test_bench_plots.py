"""`kbit bench plot`: pictures name the results they show, those of docs/ the present ones; damaged results.

A result that lacks something is drawn, or is one error with the file and its command.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kbit.bench import plots
from kbit.cli import app

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHOWN = sorted((ROOT / "docs" / "plots").glob("*.png"))
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


# -- which results a picture shows ---------------------------------------------------------------------------


def sources_of(picture: Path) -> dict[str, str]:
    """{name of a result file: SHA-256} that a PNG names; empty if it names none."""
    from PIL import Image

    with Image.open(picture) as image:
        return json.loads(image.info.get(plots.DRAWN_FROM, "{}"))


def hashes(*files: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.parametrize("picture", SHOWN, ids=lambda path: path.name)
def test_pictures_of_the_documentation_show_the_present_results(picture: Path) -> None:
    sources = sources_of(picture)
    again = "Draw it again, by the command for it in tools/measure.py."
    assert sources, f"{picture.name} does not say what it is drawn from. {again}"
    present = hashes(*(RESULTS / name for name in sources if (RESULTS / name).is_file()))
    assert sources == present, f"{picture.name} was drawn from other results than are there now. {again}"


@pytest.mark.parametrize("name", [*FILES, "h200-kernels.json"])
def test_a_picture_names_its_result(name: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["bench", "plot", str(RESULTS / name), "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    written = list(tmp_path.iterdir())
    assert written
    assert all(sources_of(picture) == hashes(RESULTS / name) for picture in written)


def test_a_picture_of_traffic_names_both_tables(tmp_path: Path) -> None:
    table, experts = RESULTS / "h200-widths.json", RESULTS / "h200-moe-widths.json"
    picture, other = tmp_path / "users.png", tmp_path / "users.svg"
    command = ["bench", "workload", str(table), "--turns", "100", "--users", "1,4", "--model", "llama-3-8b"]
    ran = CliRunner().invoke(app, [*command, "--experts", str(experts), "--plot", str(picture)])
    assert ran.exit_code == 0, ran.output
    assert sources_of(picture) == hashes(table, experts)
    assert CliRunner().invoke(app, [*command, "--plot", str(other)]).exit_code == 0  # without that key
    assert other.read_text().startswith("<?xml")
