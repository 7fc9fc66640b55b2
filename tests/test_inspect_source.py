"""`kbit inspect --source`: sources of other shapes or with NaN, and its JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from kbit.cli import app
from kbit.cli.inspect import inspect
from kbit.cli.inspected import Folder, Module, in_natural_order
from tiny_models import build_with_tokenizer

NAME = "model.layers.0.self_attn.q_proj"


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what it is quantized to."""
    place = tmp_path_factory.mktemp("models")
    source = build_with_tokenizer("llama", place / "in")
    assert run("quantize", source, place / "out").exit_code == 0
    return source, place / "out"


def with_weight(weight: torch.Tensor, folder: Path) -> Path:
    """The model with another weight."""
    source = build_with_tokenizer("llama", folder)
    tensors = load_file(source / "model.safetensors") | {f"{NAME}.weight": weight}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    return source


def test_layers_are_in_the_order_of_their_numbers() -> None:
    names = [
        "model.layers.0.up",
        "model.layers.10.up",
        "model.layers.2.experts.11",
        "model.layers.2.experts.9",
    ]
    ordered = list(in_natural_order({name: Module(name, None) for name in [*names, "lm_head"]}))
    assert ordered == ["lm_head", names[0], names[3], names[2], names[1]]


def test_what_is_printed_is_ordered(folders: tuple[Path, Path]) -> None:
    modules = {f"layers.{number}.up": Module(f"layers.{number}.up", 4) for number in (0, 1, 10, 2)}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(inspect.__globals__, "_read_folder", lambda folder: Folder(modules))
        rows = json.loads(run("inspect", folders[1], "--json").output)
    assert [row["name"].split(".")[1] for row in rows] == ["0", "1", "2", "10"]


@pytest.mark.parametrize("cut", [(slice(None), slice(16)), (slice(8), slice(None))], ids=["columns", "rows"])
def test_a_source_of_another_shape_is_named(
    folders: tuple[Path, Path], tmp_path: Path, cut: tuple[slice, slice]
) -> None:
    source, quantized = folders
    weight = load_file(source / "model.safetensors")[f"{NAME}.weight"]
    other = with_weight(weight[cut].contiguous(), tmp_path / "other")
    told = str(run("inspect", quantized, "--source", other).exception)
    assert told.startswith(f"the source's tensor '{NAME}.weight' is {list(weight[cut].shape)}, and what was")
    assert told.endswith("Is it the model this was made from?")


def test_nan_in_a_source_is_said_and_is_no_json(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, quantized = folders
    weight = load_file(source / "model.safetensors")[f"{NAME}.weight"]
    weight[0, 0] = torch.nan
    other = with_weight(weight, tmp_path / "other")
    ran = run("inspect", quantized, "--source", other, "--json")
    assert f"the source holds NaN or Inf in {NAME}." in " ".join(ran.stderr.split())
    rows = {row["name"]: row for row in json.loads(ran.stdout, parse_constant=pytest.fail)}
    assert (rows[NAME]["nmse"], rows[NAME]["sqnr_db"]) == (None, None)
    assert rows["model.layers.0.self_attn.k_proj"]["sqnr_db"] > 0
