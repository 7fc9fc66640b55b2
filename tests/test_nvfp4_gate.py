"""The gate: it holds for every lever, sees a single flipped bit, and says where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kbit.cli import app
from kbit.nvfp4 import gate, moe, reference
from kbit.nvfp4.model import seeded
from kbit.nvfp4.record import Recorder


def run(*arguments: str):
    return CliRunner().invoke(app, ["gate", *arguments])


def test_a_reference_has_no_verdicts(tmp_path: Path) -> None:
    files = str(tmp_path / "reference"), str(tmp_path / "verdicts.json")
    ran = run("--write-reference", files[0], "--json", files[1])
    assert "Leave one of them out" in str(ran.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("toggle", gate.TOGGLES)
def test_every_lever_holds(toggle: str) -> None:
    verdicts = list(gate.run_gate(toggle, [1, 8]))
    assert len(verdicts) == 2 * {"dedup": 5, "fold": 2, "tile": 5}[toggle]
    for verdict in verdicts:
        assert verdict.failure is None
        assert verdict.compared == "off and the stored reference"
    fired = {
        "dedup": "rows gathered 0 -> 160, rows quantized 428 -> 340",
        "fold": "folded norms 0 -> 24, norms 24 -> 0, rows gathered 0 -> 160, rows quantized 428 -> 0",
        "tile": "products with",
    }
    assert fired[toggle] in verdicts[0].fired


def test_the_stored_reference_is_what_the_cpu_computes() -> None:
    made = gate.make_reference([7])["1"]
    assert tuple(made) == ("exact", "seq16")
    for accum, arms in made.items():
        assert arms["plain"]["7"] == gate.stored_digests(accum, 7)
        assert arms["row_scale"]["7"] == gate.stored_digests(accum, 7, row_scale=True)
    for part in gate.MODELS:
        for kind in ("gathered", "quantized", "gemm", "tokens"):
            assert any(part in name and kind in name for name in made["exact"]["plain"]["7"])


def test_tc_has_no_stored_reference() -> None:
    (verdict, *_) = gate.run_gate("dedup", [1], "tc")
    assert (verdict.failure, verdict.compared) == (None, "off")
    assert gate.stored_digests("exact", 5) is None


def test_the_weights_are_integers_in_disguise() -> None:
    x = seeded((1000,), 3)
    assert torch.equal(x * 2**16, (x * 2**16).round())
    assert x.abs().max() < 2
    assert abs(float(x.mean())) < 0.06
    assert 0.5 < float(x.std()) < 0.65  # four uniforms on [-1/2, 1/2]
    assert not torch.equal(x, seeded((1000,), 4))


def test_a_flipped_bit_is_found_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reference.gather_rows

    def flipped(codes, scales, rows):
        codes, scales = honest(codes, scales, rows)
        codes[1, 3] ^= 1
        return codes, scales

    monkeypatch.setattr(reference, "gather_rows", flipped)
    verdicts = {each.lever: each for each in gate.run_gate("dedup", [8])}
    failure = verdicts["dedup=gather"].failure
    assert failure is not None
    assert "off and on differ first in small.layer0.gathered #0, element [1, 3]" in failure
    assert verdicts["dedup=scatter"].failure is None
    result = run("--toggle", "dedup", "--tokens", "8")
    assert result.exit_code == 1
    assert "FAILS  dedup=gather, 8 tokens" in result.output
    assert "layer0.gathered" in result.output


def test_a_change_in_both_arms_is_found_by_the_stored_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = reference.combine
    monkeypatch.setattr(reference, "combine", lambda y, inverse, p: honest(y, inverse.flip(1), p.flip(1)))
    (verdict, *_) = gate.run_gate("dedup", [8])
    assert verdict.failure is not None
    assert "differs from the stored reference of contract version 1" in verdict.failure


def test_a_lever_that_does_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "DEDUP", ("off", "off"))
    monkeypatch.setattr(gate, "DEDUP", ("off", "off"))
    verdicts = list(gate.run_gate("dedup", [1]))
    failures = [verdict.failure for verdict in verdicts]
    assert failures == [f"{verdict.lever} did not fire: both runs did the same" for verdict in verdicts]


def test_differences_of_shape_order_and_sign_of_zero() -> None:
    def recorded(*tensors: torch.Tensor) -> Recorder:
        recorder = Recorder()
        for tensor in tensors:
            recorder.add("x", tensor)
        return recorder

    zero, nan = torch.zeros(2), torch.tensor([float("nan"), 1.0])
    assert recorded(zero, nan).first_difference(recorded(zero, nan)) is None
    assert (
        str(recorded(zero, zero).first_difference(recorded(zero, -zero))) == "x #1, element [0]: 0.0 and -0.0"
    )
    shapes = recorded(zero).first_difference(recorded(torch.zeros(3)))
    assert str(shapes) == "x #0, shapes: float32[2] and float32[3]"
    assert "end of the run" in str(recorded(zero).first_difference(recorded(zero, zero)))
    assert recorded(zero).digests() != recorded(zero.view(1, 2)).digests()


def test_command_line(tmp_path: Path) -> None:
    file = tmp_path / "gate.json"
    result = run("--toggle", "fold", "--tokens", "1", "--json", str(file))
    assert result.exit_code == 0
    assert "holds  fold=on, 1 tokens" in result.output
    assert (
        "fired: activations 16 -> 0, folded activations 0 -> 16, folded norms 0 -> 24, norms 24 -> 0"
        in result.output
    )
    about = json.loads(file.read_text())
    assert (about["contract"], about["version"], about["device"]) == ("exact", 1, "cpu")
    assert [row["failure"] for row in about["verdicts"]] == [None, None]


def test_command_line_writes_the_reference(tmp_path: Path) -> None:
    file = tmp_path / "reference.json"
    assert run("--tokens", "1", "--write-reference", str(file)).exit_code == 0
    written = json.loads(file.read_text())["1"]
    assert written["exact"]["plain"]["1"] == gate.stored_digests("exact", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--toggle", "graph"], "--toggle takes all, dedup, fold or tile; got 'graph'"),
        (["--tokens", "1,x"], "--tokens takes positive whole numbers"),
        (["--tokens", "0"], "--tokens takes positive whole numbers"),
        (["--tokens", "9" * 20], "--tokens takes positive whole numbers below 10^9"),
        (["--tokens", "9" * 5000], "--tokens takes positive whole numbers below 10^9"),
        (["--accum", "fast"], "--accum takes exact, seq16 or tc; got"),
        (["--toggle", "tile", "--accum", "seq16"], "cpu has no choice of tile under seq16"),
    ],
)
def test_errors_say_what_was_wrong(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in str(result.exception)
    if "tile" not in arguments:
        assert not result.stdout, "an error has nothing above it"


@pytest.mark.gpu
@pytest.mark.parametrize("toggle", gate.TOGGLES)
def test_the_gate_holds_on_a_gpu_with_the_bytes_of_the_cpu(toggle: str) -> None:
    for verdict in gate.run_gate(toggle, [1, 8, 32], device="cuda"):
        assert verdict.failure is None, verdict.lever
        assert verdict.compared == "off and the stored reference"
