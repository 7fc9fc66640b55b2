"""tools/fuzz.py, on the CPU: it finds nothing, and something where a product is wrong."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

import kbit

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import fuzz


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    """The tool's exit status."""
    monkeypatch.setenv("KBIT_KERNEL", "")

    def call(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["fuzz.py", "--device", "cpu", *options])
        return fuzz.main()

    return call


def test_products_are_right(run, tmp_path: Path) -> None:
    file = tmp_path / "fuzz.json"
    assert run(str(file), "--seconds", "4") == 0
    found = json.loads(file.read_text())
    assert found["wrong"] == []
    assert found["products"]["dispatch"] > 0


def seed_with(chosen) -> str:
    return str(next(seed for seed in range(10_000) if chosen(fuzz.problem_of(seed))))


@pytest.mark.parametrize("one_hot", [False, True])
def test_a_wrong_number_is_found(run, monkeypatch, capsys, one_hot: bool) -> None:
    """One of many, by a unit in the last place where activations are one-hot."""
    linear = kbit.linear

    def nearly(*given, **how):
        y = linear(*given, **how)
        y[-1, -1] = torch.nextafter(y[-1, -1], y.new_tensor(9.0)) if one_hot else y[-1, -1] + 1
        return y

    monkeypatch.setattr(kbit, "linear", nearly)
    seed = seed_with(
        lambda one: one.bits == 4 and not one.experts and one.rows and one.one_hot == one_hot and not one.bias
    )
    assert run("--only", "--seed", seed) == 1
    assert "1 of " in capsys.readouterr().out


def test_a_product_that_does_not_repeat_is_found(run, monkeypatch, capsys) -> None:
    calls, product = iter((0, 1)), fuzz.nvfp4.gemm_nvfp4
    monkeypatch.setattr(fuzz.nvfp4, "gemm_nvfp4", lambda *given: product(*given) + next(calls, 0))
    seed = seed_with(lambda one: not one.bits and not one.experts and one.rows)
    assert run("--only", "--seed", seed) == 1
    assert "differ when repeated" in capsys.readouterr().out


def test_what_takes_too_long_is_told_and_ends_the_process(monkeypatch, capfd) -> None:
    monkeypatch.setattr(fuzz, "PATIENCE", 0.5)
    ended = threading.Event()
    monkeypatch.setattr(fuzz.os, "_exit", lambda status: status == 2 and ended.set())
    with fuzz.Watchdog() as watchdog:
        watchdog.now("grouped: a problem")
        assert ended.wait(20)
    assert "HANGS for 0.5 s: grouped: a problem" in capfd.readouterr().out
    ended.clear()
    assert not ended.wait(2.5)  # nobody watches any more


def test_problems_are_those_of_their_seeds() -> None:
    assert fuzz.problem_of(7) == fuzz.problem_of(7)
    problems = [fuzz.problem_of(seed) for seed in range(400)]
    for attribute in ("bits", "dtype", "dealing", "gated", "bias", "one_hot", "symmetric"):
        assert len({getattr(one, attribute) for one in problems}) > 1
    assert all(one.n % 32 == 0 for one in problems if one.gated)
