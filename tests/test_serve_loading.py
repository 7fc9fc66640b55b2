"""What `kbit serve` refuses before it answers: what `kbit generate` refuses, in the same words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cli.serving.model_manager import ModelManager
from typer.testing import CliRunner

import kbit
import warm_processes
from kbit.cli import app
from kbit.cli.model_folder import load_model
from kbit.cli.serve_loading import load_as_other_commands
from tiny_models import build_with_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An unquantized model with a tokenizer."""
    return build_with_tokenizer("llama", tmp_path / "model")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch):
    """Loads a model as the server does."""
    for owner, name in ((PreTrainedModel, "from_pretrained"), (ModelManager, "_load_model")):
        monkeypatch.setattr(owner, name, vars(owner)[name])  # as it is afterwards
    load_as_other_commands()
    return lambda folder: ModelManager(device="cpu", force_model=str(folder))


def quantized(folder: Path) -> Path:
    """A folder, k-bit."""
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=kbit.KbitConfig(bits=4))
    model.save_pretrained(folder)
    return folder


def stated(folder: Path, **settings: object) -> None:
    """Change what a folder's config says; None takes it out."""
    config = json.loads((folder / "config.json").read_text()) | settings
    left = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(left))


def test_codes_without_their_config(folder, serve):
    serve(quantized(folder))
    stated(folder, quantization_config=None)
    with pytest.raises(ValueError, match="holds weights that kbit has quantized, but ") as found:
        serve(folder)
    with pytest.raises(ValueError, match="would be drawn at random") as told:
        load_model(folder)
    assert str(found.value) == str(told.value)


def test_others_of_the_process_load_as_before(folder, serve):
    stated(folder, attention_bias=True)
    assert AutoModelForCausalLM.from_pretrained(folder).config.attention_bias


def test_biases_that_no_file_holds(folder, serve):
    stated(folder, attention_bias=True)
    with pytest.raises(ValueError, match="has no weights for 8 parameters of the model, such as ") as found:
        serve(folder)
    assert str(found.value).startswith(f"{folder} has no weights")


def test_sizes_that_no_file_has(folder, serve):
    stated(folder, hidden_size=64)
    with pytest.raises(ValueError, match=r"its config.json gives some weights other") as found:
        serve(folder)
    with pytest.raises(ValueError, match="other") as told:
        load_model(folder)
    assert str(found.value) == str(told.value)


def test_who_asks_what_was_found_is_told(folder, serve):
    kind, serves = type(load_model(folder)), serve(folder)
    assert serves.loaded_models
    _, found = kind.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"]
    assert isinstance(kind.from_pretrained(folder), kind)


def test_codes_of_another_library(folder, monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda *_: pytest.fail("served"))
    file = folder / "model.safetensors"
    codes = {"model.layers.0.mlp.up_proj.weight": torch.zeros(72, 20, dtype=torch.uint8)}
    save_file(load_file(file) | codes, file, metadata={"format": "pt"})
    stated(folder, quantization_config={"quant_method": "modelopt"})
    told = str(CliRunner().invoke(app, ["serve", str(folder), "--port", "0"]).exception)
    assert told.startswith(f"{folder} is quantized by 'modelopt', which transformers cannot load.")


def test_the_command_ends_with_one_line(folder):
    stated(folder, attention_bias=True)
    command = warm_processes.command("-m", "kbit", "serve", folder, "--port", "0", "--device", "cpu")
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(f"error: {folder} has no weights for 8 parameters")
    assert "Traceback" not in ran.stderr
