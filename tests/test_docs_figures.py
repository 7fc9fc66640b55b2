"""What pages say beside measured figures: noise, what is included, what is counted."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from docs_blocks import ROOT
from kbit.format.policy import QuantizationPolicy

MACHINE = {"gpu": "A GPU", "driver": "1", "cuda": "2", "torch": "3", "commit": "0123456789ab+changes"}


@pytest.fixture
def render_docs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """tools/render_docs.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("render_docs")


def shown(render_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, section: str, result: Any) -> str:
    """A section of a made-up result."""
    monkeypatch.setattr(render_docs, "load_if_there", lambda name: {"machine": MACHINE} | result)
    return render_docs.SECTIONS[section]()


@pytest.mark.parametrize(("spread", "cell"), [(0.01, "(1.20) | 1%"), (0.3, "(~1.20) | 30%")])
def test_a_step_of_training_within_its_spread_is_marked(
    render_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, spread: float, cell: str
) -> None:
    common = {"weight_bytes": 10**9, "peak_bytes": 10**9, "first_loss": 2.0, "last_loss": 1.0}
    arms = [
        common | {"name": "bf16", "ms": 100.0, "spread": 0.02, "time_vs_bf16": 1.0},
        common | {"name": "kbit k=4", "ms": 120.0, "spread": spread, "time_vs_bf16": 1.2},
    ]
    result = {"model": "small", "plan": {"sequences": 2, "tokens": 8, "repeats": 7}, "arms": arms}
    text = shown(render_docs, monkeypatch, "training", result)
    assert f"| small, kbit k=4 | 1.0 | 1.0 | 120 {cell} | 2.00 to 1.00 |" in text
    assert "| small, bf16 | 1.0 | 1.0 | 100 (1.00) | 2% |" in text
    assert "A LoRA step of 16 tokens" in text
    assert ("~: no further" in text) == ("~1.20" in text)
    assert "kbit at 0123456+changes." in text


@pytest.mark.parametrize(("plan", "included"), [({}, True), ({"warm_up": 1}, False)])
def test_serving_says_whether_graphs_were_recorded_meanwhile(
    render_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, plan: dict[str, int], included: bool
) -> None:
    text = shown(render_docs, monkeypatch, "serving", {"plan": plan, "models": {}})
    assert ("The first requests of each level, which record graphs, are included." in text) == included


@pytest.mark.parametrize("told", [False, True])
def test_quantizing_counts_what_is_quantized(
    render_docs: ModuleType, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """Also of a file that does not tell it: half of two billion weights, at 4.25 bits."""
    run = {"jobs": 1, "weights": 2 * 10**9, "bytes_in": 4 * 10**9, "seconds": 2.0}
    run |= {"bytes_out": 10**9 * 17 // 32 + 2 * 10**9} | ({"quantized_weights": 10**9} if told else {})
    result = {"model": "small", "layers": 1, "policy": QuantizationPolicy(bits=4).to_dict(), "runs": [run]}
    text = shown(render_docs, monkeypatch, "quantizing", result)
    assert "1.0 billion weights that are quantized, which alone are counted, and 1.0 billion that" in text
    assert "| 1 | 500 | 160 |" in text


def test_chats_say_which_prompts_are_replayed(render_docs: ModuleType) -> None:
    assert "of up to 2048 tokens come from CUDA graphs; longer ones run kernel by" in render_docs.chats()
