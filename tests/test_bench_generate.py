"""`kbit bench generate`, `kbit bench chat` and the times of tokens, on a CPU; their graphs on a GPU."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kbit.bench import chat, generate_plot
from kbit.bench import generate as bench
from kbit.cli import app
from kbit.integrations.transformers import token_times
from tiny_models import ARCHITECTURES, write_config


@pytest.fixture(autouse=True)
def overlap_is_undone(monkeypatch):
    """--compile has kernels overlap from then on, in other tests too."""
    import torch._inductor.config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_ENABLE_PDL", "0")
    with inductor.patch("triton.enable_pdl", getattr(inductor.triton, "enable_pdl", False)):
        yield


@pytest.fixture
def config_file(tmp_path):
    config = ARCHITECTURES["qwen3_moe"]()
    path = tmp_path / "tiny.json"
    return write_config(config, path)


def run(config_file, *options):
    out = config_file.with_name("generate.json")
    command = ["bench", "generate", str(config_file), "--prompt", "5", "--new-tokens", "6", *options]
    result = CliRunner().invoke(app, [*command, "--json", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.output


def test_on_a_cpu(config_file):
    found, output = run(config_file, "--device", "cpu", "--bits", "3,4", "--compile")
    assert found["plan"] == {"prompt": 5, "new_tokens": 6}
    assert [row["arm"] for row in found["rows"]] == ["kbit k=3", "kbit k=4", "bf16"]
    for row in found["rows"]:
        assert row["way"] == bench.EAGER
        assert min(row["first_call_s"], row["first_token_s"]) > 0
        assert row["tokens_s"] > 0
    assert "kernel by kernel" in output


@pytest.mark.gpu
def test_on_a_gpu(config_file):
    found, _ = run(config_file, "--compile")
    ways = [bench.EAGER, bench.GRAPHS, bench.COMPILED]
    assert [(row["arm"], row["way"]) for row in found["rows"]] == [
        (arm, way) for arm in ("kbit k=4", "bf16") for way in ways
    ]
    assert all(row["reason"] is None for row in found["rows"][:3])


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {"arm": arm, "way": way, "tokens_s": speed}
        for arm, speed in (("kbit k=3", 30.0), ("kbit k=4", 20.0), ("bf16", 10.0))
        for way in (bench.EAGER, bench.GRAPHS)
    ]
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"model": "some/tiny.json", "machine": {"gpu": None}, "rows": rows}))
    assert list(generate_plot.bars({"rows": rows})) == ["bf16", "kbit k=3", "kbit k=4"]
    result = CliRunner().invoke(app, ["bench", "plot", str(file), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "generate-tiny.png").read_bytes().startswith(b"\x89PNG")
    assert not generate_plot.is_generate({"rows": [{"perplexity": 1.0}]})


def chat_of(config_file, *options):
    out = config_file.with_name("chat.json")
    sizes = ["--turns", "3", "--first", "30", "--message", "5", "--new-tokens", "4"]
    command = ["bench", "chat", str(config_file), *sizes, *options, "--json", str(out)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(out.read_text()), result.output


def test_a_chat(config_file, tmp_path):
    found, output = chat_of(config_file, "--device", "cpu")
    assert found["plan"] == {"turns": 3, "first": 30, "message": 5, "new_tokens": 4}
    assert [(row["arm"], row["way"], row["turn"], row["prompt"]) for row in found["rows"]] == [
        (arm, way, turn, 21 + 9 * turn)
        for arm in ("kbit k=4", "bf16")
        for way in (chat.WHOLE, chat.KEPT)
        for turn in (1, 2, 3)
    ]
    assert all(row["first_token_s"] > 0 and row["tokens_s"] > 0 for row in found["rows"])
    assert chat.KEPT in output
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(app, ["bench", "plot", str(tmp_path / "chat.json"), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "chat-tiny.png").read_bytes().startswith(b"\x89PNG")
    assert not generate_plot.is_generate(found)


@pytest.mark.gpu
def test_a_chat_on_a_gpu(config_file):
    found, _ = chat_of(config_file)
    assert len(found["rows"]) == 12


def test_times_of_tokens(monkeypatch):
    clock = iter([10.0, 10.5, 11.0, 11.25, 11.5, 13.0])
    monkeypatch.setattr(token_times.time, "perf_counter", lambda: next(clock))
    seen = []

    class Streamer:
        put = staticmethod(seen.append)
        end = staticmethod(lambda: seen.append("end"))

    times = token_times.TokenTimes(Streamer())
    for value in "prompt", "a", "b", "c", "d":
        times.put(value)
    times.end()
    assert seen == ["prompt", "a", "b", "c", "d", "end"]
    assert times.tokens == [1.0, 1.25, 1.5, 3.0]
    assert times.tokens_s == 4.0


def test_one_token_has_no_speed():
    times = token_times.TokenTimes()
    for _ in range(2):
        times.put(None)
    times.end()
    assert len(times.tokens) == 1
    assert times.tokens_s is None
