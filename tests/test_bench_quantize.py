"""`kbit bench quantize`: a random checkpoint is written, quantized by several workers, and removed."""

from __future__ import annotations

import json
from collections import namedtuple

import pytest
from typer.testing import CliRunner

from kbit.bench import random_models
from kbit.cli import app
from kbit.format.safetensors_header import read_header
from parallel_models import PARALLEL
from tiny_models import write_config


@pytest.fixture
def config_file(tmp_path):
    """The config.json of a tiny mixture."""
    config = PARALLEL["qwen3_moe"]()
    path = tmp_path / "config.json"
    return write_config(config, path)


def test_the_command_on_a_cpu(config_file, tmp_path):
    out, folder = tmp_path / "result.json", tmp_path / "disk"
    folder.mkdir()
    command = ["bench", "quantize", str(config_file), "--device", "cpu", "--jobs", "1,2", "--layers", "1"]
    result = CliRunner().invoke(app, [*command, "--folder", str(folder), "--json", str(out)])
    assert result.exit_code == 0, result.output
    runs = json.loads(out.read_text())["runs"]
    assert [run["jobs"] for run in runs] == [1, 2]
    for run in runs:
        assert run["bytes_in"] == 2 * run["weights"] > run["bytes_out"] > 0
        assert run["weights"] == run["quantized_weights"] + run["copied"]
        assert run["quantized_weights"] > 0
        assert run["copied"] > 0  # embeddings, say
        assert run["weights_per_second"] == pytest.approx(run["quantized_weights"] / run["seconds"])
        assert run["seconds_for_80b"] == pytest.approx(80e9 / run["weights_per_second"])
    assert not list(folder.iterdir())


def test_workers_of_several_devices(config_file, tmp_path):
    command = ["bench", "quantize", str(config_file), "--device", "cpu,cpu", "--folder", str(tmp_path)]
    before = sorted(tmp_path.iterdir())
    refused = CliRunner().invoke(app, [*command, "--jobs", "2,1"])
    assert "--jobs 1 leaves some of 2 devices idle" in str(refused.exception)
    assert sorted(tmp_path.iterdir()) == before
    out = tmp_path / "result.json"
    result = CliRunner().invoke(app, [*command, "--layers", "1", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [run["jobs"] for run in json.loads(out.read_text())["runs"]] == [2, 4, 8]


def test_too_little_space_is_said_before_a_model_is_made(config_file, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(random_models.shutil, "disk_usage", lambda folder: usage(1000))
    with pytest.raises(OSError, match=r"0\.0 GB free.*--layers"):
        random_models.write(str(config_file), None, tmp_path / "model", "cpu")
    assert not (tmp_path / "model").exists()


def test_random_checkpoints_are_whole_models(config_file, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "model"
    weights = random_models.write(str(config_file), None, folder, torch.device("cpu"))
    random_models.forget(folder)
    assert weights == sum(info.numel for info in read_header(folder / "model.safetensors").values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id is None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": " 5 7"}], tokenize=False)
    assert tokenizer(ids)["input_ids"] == [1, 9, 11]


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    out = tmp_path / "result.json"
    command = ["bench", "quantize", "llama-3-8b", "--layers", "1", "--jobs", "1,4", "--json", str(out)]
    result = CliRunner().invoke(app, [*command, "--folder", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert [run["jobs"] for run in json.loads(out.read_text())["runs"]] == [1, 4]
