"""`kbit quantize --calibrate`: equal to calibrating the model in memory, and as safe as without."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import kbit
from kbit.cli import calibrate, texts
from kbit.cli.texts import encode_windows
from kbit.integrations.streaming import Codes, jobs, quantize_checkpoint
from quantize_runs import SMALL_SHARD, content, fail_at, refuse, run
from tiny_models import ARCHITECTURES, build_with_tokenizer

WORDS = " ".join(f"w{i * 7 % 72}" for i in range(300))


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(texts, "WINDOW", 60)
    file = tmp_path / "text.txt"
    file.write_text(WORDS)
    return file


# transformers reads Qwen3.5's text by Qwen's own tokenizer, whatever is saved, and knows none of these words.
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {"qwen3_5_moe"}))
def test_equals_calibrating_the_model_in_memory(tmp_path, text, architecture):
    source, out = build_with_tokenizer(architecture, tmp_path / "in"), tmp_path / "out"
    result = run(source, out, "--calibrate", text, "--override", "down_proj=3", "--embedding-bits", 5)
    assert result.exit_code == 0, result.output
    policy = kbit.KbitConfig(bits=4, overrides={"down_proj": 3}, embedding_bits=5)
    samples = encode_windows(source, WORDS, 60, None).split(1)
    model = AutoModelForCausalLM.from_pretrained(source)
    kbit.quantize_model(model, policy, calibration=samples).save_pretrained(tmp_path / "expected")
    ours, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in expected.items())
    assert run(source, tmp_path / "search", "--override", "down_proj=3", "--embedding-bits", 5).exit_code == 0
    plain = load_file(tmp_path / "search" / "model.safetensors")
    other = [name for name, tensor in plain.items() if not torch.equal(ours[name], tensor)]
    assert other
    assert all(name.endswith(("_packed", "_absmax")) for name in other)
    AutoModelForCausalLM.from_pretrained(out)


def test_what_the_samples_did_not_reach_is_named(tmp_path, text, monkeypatch):
    """The files of a model without head name its layers otherwise than saving does."""
    monkeypatch.setattr(calibrate, "LOG_SECONDS", 0.0)
    source = build_with_tokenizer("llama", tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = run(source, tmp_path / "out", "--calibrate", text)
    said = " ".join(result.output.split())
    assert "14 tensors not calibrated, such as layers.0.mlp.down_proj.weight: the model that ran" in said
    assert "calibrating layers: 14 of 14" in said  # in a log, which shows no bar


def test_goes_on_with_the_same_text_only(tmp_path, text, monkeypatch):
    monkeypatch.setattr(jobs, "SHARD_BYTES", SMALL_SHARD)
    source, out = build_with_tokenizer("qwen3_moe", tmp_path / "in"), tmp_path / "out"
    assert run(source, tmp_path / "once", "--calibrate", text).exit_code == 0
    with monkeypatch.context() as patched:
        fail_at(patched, 3, OSError(28, "No space left on device"))
        assert "keeps 2 finished shards" in refuse(source, out, "--calibrate", text)
    other = tmp_path / "other.txt"
    other.write_text(WORDS[9:])
    for options in ([], ["--calibrate", other]):
        assert "other settings" in refuse(source, out, *options)
    result = run(source, out, "--calibrate", text)
    assert result.exit_code == 0
    assert "2 of them from before" in result.output
    assert content(out) == content(tmp_path / "once")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibrate", "{tmp}/none.txt"], "none.txt"),
        (["--calibrate", "{tmp}/latin1.txt"], "--calibrate .*not UTF-8"),
        (["--calibrate", "{tmp}/empty.txt"], "at least 2"),
        (["--calibrate", "{tmp}/text.txt", "--device", "cpu,cpu"], "no device 'cpu,cpu'. Use one of"),
    ],
)
def test_refuses_before_it_writes(tmp_path, text, options, message):
    source = build_with_tokenizer("llama", tmp_path / "in")
    (tmp_path / "latin1.txt").write_bytes("caf\xe9".encode("latin1"))
    (tmp_path / "empty.txt").write_text("")
    before = sorted(tmp_path.iterdir())
    given = [str(option).format(tmp=tmp_path) for option in options]
    said = refuse(source, tmp_path / "out", *given)
    assert re.search(message, said), said
    assert sorted(tmp_path.iterdir()) == before


def test_a_tokenizer_of_another_model_is_refused(tmp_path, text):
    source = build_with_tokenizer("llama", tmp_path / "in")
    file = source / "tokenizer.json"
    file.write_text(file.read_text().replace('"w71": 71', '"w71": 72').replace('"w71":71', '"w71":72'))
    assert "ids up to 72" in refuse(source, tmp_path / "out", "--calibrate", text)
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("stopped_by", [KeyboardInterrupt, SystemExit(143)])
def test_stopped_before_a_shard_is_whole_it_leaves_nothing(tmp_path, stopped_by):
    source = build_with_tokenizer("llama", tmp_path / "in")
    before = sorted(tmp_path.iterdir())

    def stopped() -> dict[str, torch.Tensor]:
        assert (tmp_path / "out.partial").is_dir()
        raise stopped_by

    codes = Codes("calibrated", stopped)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        quantize_checkpoint(source, tmp_path / "out", kbit.KbitConfig(), codes=codes)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_gpu_is_as_exact(tmp_path, text, architecture):
    source = build_with_tokenizer(architecture, tmp_path / "in")
    ids = encode_windows(source, WORDS, 60, None)
    with torch.no_grad():
        exact = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        errors = []
        for name, options in (("search", []), ("cpu", ["cpu"]), ("cuda", ["cuda"])):
            calibrated = ["--calibrate", text, "--device", *options] if options else []
            assert run(source, tmp_path / name, "--bits", 3, *calibrated).exit_code == 0
            model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            errors.append(float((model(ids).logits - exact).square().mean()))
    search, cpu, cuda = errors
    assert cuda < search
    assert cuda == pytest.approx(cpu, rel=0.2)


def test_a_short_text_is_warned_of(tmp_path, text, monkeypatch):
    source = build_with_tokenizer("llama", tmp_path / "in")
    warned = run(source, tmp_path / "out", "--calibrate", text).output
    assert "has 300 tokens only" in " ".join(warned.split())
    monkeypatch.setattr(texts, "FEW_TOKENS", 300)
    assert "tokens only" not in run(source, tmp_path / "again", "--calibrate", text).output


@pytest.mark.parametrize("more", [{}, {"text_config": None}])
def test_windows_are_as_long_as_a_model_knows_positions(tmp_path, text, more):
    source = build_with_tokenizer("llama", tmp_path / "in")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24} | more))
    result = run(source, tmp_path / "out", "--calibrate", text)
    assert result.exit_code == 0, result.output
    assert texts.calibration_samples(source, WORDS, text).shape[1] == 24
