"""tools/fuzz.py, on the CPU: it finds nothing, and something where a result is wrong."""

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
import fuzz_around
import fuzz_checks
import fuzz_products


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
    assert found["done"]["dispatch"] > 0


def seed_with(chosen) -> str:
    """Of a product."""
    return str(next(seed for seed in range(0, 40_000, 4) if chosen(fuzz_products.problem_of(seed))))


def seed_of(name: str) -> str:
    """Of a problem around products."""
    picks = ((seed, fuzz_around.Draw(seed, torch.device("cpu"))) for seed in range(3, 40_000, 4))
    return str(next(seed for seed, draw in picks if draw.of(*fuzz_around.CALLS).__name__ == name))


@pytest.mark.parametrize("call", fuzz_around.CALLS, ids=lambda call: call.__name__)
def test_what_stands_around_products_is_right(run, monkeypatch, call) -> None:
    monkeypatch.setattr(fuzz_around, "MOST", 2**16)
    assert run("--only", "--seed", seed_of(call.__name__)) == 0


@pytest.mark.parametrize("name", ["rotary", "attention_step", "moe_route", "quantize", "nvfp4_formats"])
def test_a_wrong_result_of_an_op_is_found(run, monkeypatch, capsys, name: str) -> None:
    """In its first number alone."""
    own, calls = fuzz_around.Call.run, []

    def nearly(call, to=None):
        y, *rest = own(call, to)
        calls.append(name)
        if len(calls) > 1:  # the first is what is wanted
            y = y.contiguous().clone()
            y.view(-1)[0] += 0.5 if call.roundings else 2**-7 if y.is_floating_point() else 1
        return y, *rest

    monkeypatch.setattr(fuzz_around, "MOST", 2**16)
    monkeypatch.setattr(fuzz_around.Call, "run", nearly)
    assert run("--only", "--seed", seed_of(name)) == 1
    assert "1 of " in capsys.readouterr().out


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
    calls, product = iter((0, 1)), fuzz_products.nvfp4.gemm_nvfp4
    monkeypatch.setattr(fuzz_products.nvfp4, "gemm_nvfp4", lambda *given: product(*given) + next(calls, 0))
    seed = seed_with(lambda one: not one.bits and not one.experts and one.rows)
    assert run("--only", "--seed", seed) == 1
    assert "differ when repeated" in capsys.readouterr().out


def test_what_takes_too_long_is_told_and_ends_the_process(monkeypatch, capfd) -> None:
    monkeypatch.setattr(fuzz_checks, "PATIENCE", 0.5)
    ended = threading.Event()
    monkeypatch.setattr(fuzz_checks.os, "_exit", lambda status: status == 2 and ended.set())
    with fuzz.Watchdog() as watchdog:
        watchdog.now("grouped: a problem")
        assert ended.wait(20)
    assert "HANGS for 0.5 s: grouped: a problem" in capfd.readouterr().out
    ended.clear()
    assert not ended.wait(2.5)  # nobody watches any more


def test_problems_are_those_of_their_seeds() -> None:
    assert fuzz_products.problem_of(7) == fuzz_products.problem_of(7)
    problems = [fuzz_products.problem_of(seed) for seed in range(400)]
    for attribute in ("bits", "dtype", "dealing", "gated", "bias", "one_hot", "symmetric"):
        assert len({getattr(one, attribute) for one in problems}) > 1
    assert all(one.n % 32 == 0 for one in problems if one.gated)
