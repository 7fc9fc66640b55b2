"""`kbit eval` in another dtype, and on a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from tiny_models import build_with_tokenizer

WORDS = " ".join(f"w{i * 7 % 72}" for i in range(300))


@pytest.fixture
def given(tmp_path: Path) -> list[object]:
    """A model's folder and options to score a text with it, of all widths."""
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    text.write_text(WORDS)
    other.write_text(WORDS[9:])
    options = ("--text", text, "--window", 60, "--bits", "3,4", "--embedding-bits", 4, "--calibrate", other)
    return [build_with_tokenizer("qwen3_moe", tmp_path / "in"), *options]


def result_of(folder: Path, *arguments: object) -> dict:
    file = folder / "result.json"
    run = CliRunner().invoke(app, ["eval", *map(str, arguments), "--json", str(file)])
    assert run.exit_code == 0, run.output
    return json.loads(file.read_text())


def require_near(found: dict, exact: dict, tolerance: float) -> None:
    assert [row["model"] for row in found["rows"]] == [row["model"] for row in exact["rows"]]
    for one, other in zip(found["rows"], exact["rows"], strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["perplexity"] == pytest.approx(other["perplexity"], rel=tolerance)


def test_in_16_bits(tmp_path: Path, given: list[object]) -> None:
    exact, found = result_of(tmp_path, *given), result_of(tmp_path, *given, "--dtype", "bf16")
    assert (exact["dtype"], found["dtype"], found["device"]) == ("float32", "bf16", "cpu")
    assert exact["rows"] != found["rows"]
    require_near(found, exact, 0.02)


def test_windows_longer_than_the_context_are_refused(tmp_path: Path, given: list[object]) -> None:
    folder = Path(str(given[0]))
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 59}
    (folder / "config.json").write_text(json.dumps(config))
    run = CliRunner().invoke(app, ["eval", *map(str, given)])
    assert "windows of 60 tokens are longer than the 59" in str(run.exception)


def test_a_text_without_tokens_is_named(tmp_path: Path, given: list[object]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    run = CliRunner().invoke(app, ["eval", *map(str, given), "--calibrate", str(empty)])
    assert str(run.exception).startswith(f"--calibrate {empty} has 0 tokens; at least 2 are needed.")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--device", "cuda:99"), "no device 'cuda:99'"),
        (("--device", "tpu"), "no device 'tpu'"),
        (("--dtype", "int8"), "--dtype"),
    ],
)
def test_what_it_cannot_compute_in(given: list[object], option: tuple[str, str], message: str) -> None:
    run = CliRunner().invoke(app, ["eval", *map(str, given), *option])
    assert run.exit_code == 1
    assert message in str(run.exception)


@pytest.mark.gpu
def test_a_gpu_finds_the_same(tmp_path: Path, given: list[object]) -> None:
    exact = result_of(tmp_path, *given)
    for dtype, tolerance in (("float32", 1e-3), ("bfloat16", 0.02)):
        require_near(result_of(tmp_path, *given, "--device", "cuda", "--dtype", dtype), exact, tolerance)


def test_a_model_of_nan_is_named(tmp_path: Path) -> None:
    folder, text = build_with_tokenizer("llama", tmp_path / "in"), tmp_path / "text.txt"
    text.write_text(WORDS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data[3] = torch.nan
    model.save_pretrained(folder)
    run = CliRunner().invoke(app, ["eval", str(folder), "--text", str(text), "--window", "60"])
    assert run.exit_code == 0, run.output
    assert "computes NaN: weights hold NaN or Inf" in run.output


def test_a_perplexity_beyond_numbers_is_infinite(tmp_path: Path) -> None:
    """As of a model with a damaged norm, which is what one would look for by this."""
    folder, text = build_with_tokenizer("llama", tmp_path / "in"), tmp_path / "text.txt"
    text.write_text(WORDS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.model.norm.weight.data.fill_(1e6)
    model.save_pretrained(folder)
    result = result_of(tmp_path, folder, "--text", text, "--bits", 4)
    assert [row["perplexity"] for row in result["rows"]] == [None, None]


def test_codebooks_are_compared(tmp_path: Path, given: list[object]) -> None:
    levels = tmp_path / "mine.json"
    levels.write_text(json.dumps({"3": [-1, -0.6, -0.3, -0.1, 0.1, 0.3, 0.6, 1]}))
    options = ("--bits", 3, "--codebook", "nf", "--codebook", "bof", "--codebook", levels)
    rows = result_of(tmp_path, *given[:5], *options)["rows"]
    assert [row["method"] for row in rows[1:]] == ["search", "search, bof", "search, mine"]
    assert rows[2]["nmse"] < rows[1]["nmse"]
    (tmp_path / "more").mkdir()
    other = tmp_path / "more" / "mine.json"
    other.write_text(levels.read_text().replace("0.6", "0.61"))
    options = ("--bits", 3, "--codebook", levels, "--codebook", other)
    rows = result_of(tmp_path, *given[:5], *options)["rows"]
    assert [row["method"] for row in rows[1:]] == [f"search, {levels}", f"search, {other}"]
    run = CliRunner().invoke(app, ["eval", *map(str, given), "--codebook", "nf5"])
    assert "unknown codebook 'nf5'" in str(run.exception)


def test_tied_weights_count_once(tmp_path: Path, given: list[object]) -> None:
    source, options = build_with_tokenizer("llama", tmp_path / "tied"), ("--bits", 3, "--embedding-bits", 5)
    _, found = result_of(tmp_path, source, "--text", given[2], *options)["rows"]
    model = AutoModelForCausalLM.from_pretrained(source)
    weights = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    kbit.quantize_model(model, kbit.KbitConfig(bits=3, embedding_bits=5))
    assert model.lm_head.weight_packed is model.model.embed_tokens.weight_packed
    decoded = dict(kbit.dequantize_model(model).named_parameters())
    assert decoded.keys() >= weights.keys()
    error = sum(float((decoded[name] - weight).detach().square().sum()) for name, weight in weights.items())
    assert found["nmse"] == pytest.approx(error / sum(float(w.square().sum()) for w in weights.values()))
    assert 3.25 < found["bits_per_weight"] < 5.25


def test_windows_are_as_long_as_they_are(tmp_path: Path, given: list[object]) -> None:
    result = result_of(tmp_path, given[0], "--text", given[2], "--max-tokens", 40)
    assert result["window"] == 40


def test_texts_to_calibrate_by_are_long_and_others(tmp_path: Path, given: list[object]) -> None:
    command = ["eval", *map(str, given[:5]), "--bits", "4", "--calibrate"]
    for text, told in ((given[2], True), (given[-1], False)):
        run = CliRunner().invoke(app, [*command, str(text)])
        output = " ".join(run.output.split())
        assert run.exit_code == 0, output
        assert "tokens only, and codes go by what layers see of it" in output
        assert (f"{text} is what models are scored on, too" in output) == told


def gone(*_: object, **__: object) -> None:
    raise BrokenPipeError


def test_a_result_is_saved_before_it_is_printed(
    tmp_path: Path, given: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reader may be gone: `| head`, or a pager that was left."""
    monkeypatch.setattr("kbit.cli.eval.show", gone)
    run = CliRunner().invoke(app, ["eval", *map(str, given[:3]), "--json", str(tmp_path / "e.json")])
    assert run.exit_code != 0
    assert len(json.loads((tmp_path / "e.json").read_text())["rows"]) == 1


def test_a_profile_is_saved_before_it_is_printed(
    tmp_path: Path, given: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["kbit.cli.profile"], "_print", gone)  # the command has its name, too
    options = ["--device", "cpu", "--steps", "2", "--context", "4", "--json", str(tmp_path / "p.json")]
    run = CliRunner().invoke(app, ["profile", str(given[0]), *options])
    assert run.exit_code != 0
    assert len(json.loads((tmp_path / "p.json").read_text())["profiles"]) == 1
