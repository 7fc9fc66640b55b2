"""`kbit bench attention`: both arms compute a layer's step, ratios, the command; a real run on a GPU."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kbit.bench import attention
from kbit.bench.attention import TORCH, AttentionRow
from kbit.bench.gpu_timing import GpuTiming
from kbit.cli import app

CPU = torch.device("cpu")
ROWS = [
    AttentionRow("a", 2, 9, 16, TORCH, 8.0, 0.1, 4000),
    AttentionRow("a", 2, 9, 16, "kbit", 2.0, 0.1, 4000),
]


def timed(arms, repeats):
    """A timer that calls every arm."""
    assert all(torch.isfinite(call()).all() for arm in arms.values() for call in arm.calls)
    return {name: GpuTiming(1.0 + i, 0.5) for i, name in enumerate(arms)}


@pytest.mark.parametrize("model", attention.LAYERS)
def test_both_arms_compute_the_step(model):
    rows = attention.layer_rows(model, 2, 5, 12, 7, timed, CPU)
    assert [(row.arm, row.us) for row in rows] == [(TORCH, 1.0), ("kbit", 2.0)]
    layer = attention.LAYERS[model]
    assert {row.cache_bytes for row in rows} == {2 * 2 * 2 * 6 * layer.key_heads * layer.columns}


def test_wrong_results_are_not_measured(monkeypatch):
    monkeypatch.setattr(attention._Step, "by_one_kernel", lambda step, scaling: step.query)
    with pytest.raises(ValueError, match=r"bench attention: kbit is wrong on llama-3-8b, batch 1, 5 tokens"):
        attention.layer_rows("llama-3-8b", 1, 5, 6, 7, timed, CPU)


def test_a_cache_without_room_for_the_token_is_refused():
    with pytest.raises(ValueError, match="--room must be more than 5 tokens, got 5"):
        attention.layer_rows("llama-3-8b", 1, 5, 5, 7, timed, CPU)


def test_ratios():
    found = attention.as_json(ROWS)
    assert [row["vs_torch"] for row in found] == [1.0, 4.0]
    assert [row["gb_s"] for row in found] == [0.5, 2.0]


def test_the_command(monkeypatch, tmp_path):
    from kbit.bench import gpu_timing

    monkeypatch.setattr(gpu_timing, "require_gpu", lambda command: None)
    monkeypatch.setattr(gpu_timing, "result_header", lambda repeats: {"read_bandwidth_gb_s": 2.0})
    monkeypatch.setattr(attention, "layer_rows", lambda model, *given: ROWS)
    out = tmp_path / "rows.json"
    command = ["bench", "attention", "--batch", "2", "--tokens", "9", "--json", str(out)]
    result = CliRunner().invoke(app, [*command, "--model", "llama-3-8b"])
    assert result.exit_code == 0, result.output
    assert "PyTorch 8.00 us, kbit 2.00 us" in result.output
    assert json.loads(out.read_text())["rows"] == attention.as_json(ROWS)
    refused = CliRunner().invoke(app, [*command, "--model", "gpt"])
    assert refused.exit_code != 0


@pytest.mark.gpu
def test_on_a_gpu(tmp_path):
    out = tmp_path / "rows.json"
    command = ["bench", "attention", "--batch", "1,3", "--tokens", "300", "--room", "512", "--repeats", "7"]
    result = CliRunner().invoke(app, [*command, "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 * 2 * len(attention.LAYERS)
    assert all(row["us"] > 0 for row in rows)
