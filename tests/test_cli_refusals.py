"""What commands refuse before the work, or before they run out of what a model has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from kbit.cli import app
from kbit.format import QuantizationPolicy
from kbit.format.counts import refuse_more_than_tensors
from kbit.nn import leftovers
from tiny_models import build_with_tokenizer, quantize_files, write_config

POSITIONS = 32


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def config() -> OPTConfig:
    """Of a model with a table of positions, which has no row for a later one."""
    sizes = {"hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32, "vocab_size": 64}
    counts = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": POSITIONS}
    return OPTConfig(**sizes, **counts)


@pytest.fixture(scope="module")
def folder(config: OPTConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That model."""
    place = tmp_path_factory.mktemp("models") / "opt"
    OPTForCausalLM(config).save_pretrained(place)
    return place


def test_decoding_ends_with_the_models_positions(folder: Path) -> None:
    command = ("bench", "decode", folder, "--prompt-tokens", 8, "--new-tokens")
    assert run(*command, POSITIONS - 8).exit_code == 0
    refused = run(*command, POSITIONS - 7)
    assert str(refused.exception) == (
        f"{folder}: --prompt-tokens 8 with --new-tokens 25 takes 33 positions, more than the 32 that the "
        "model knows (max_position_embeddings). Give fewer."
    )


def test_a_profile_ends_with_the_models_positions(folder: Path, config: OPTConfig, tmp_path: Path) -> None:
    short = ("--device", "cpu", "--steps", 4, "--context")
    random = ("--random", write_config(config, tmp_path / "opt.json"))
    for model in ((folder,), random):
        ran = run("profile", *model, *short, POSITIONS - 4)
        assert ran.exit_code == 0, ran.exception
        told = str(run("profile", *model, *short, POSITIONS - 3).exception)
        assert told.startswith("opt: --context 29 with --steps 4 takes 33 positions, more than the 32 that")


@pytest.mark.parametrize("command", [("generate", "folder", "w1"), ("profile", "folder"), ("eval", "folder")])
def test_dtypes_have_short_names(command: tuple[str, ...]) -> None:
    told = " ".join(run(command[0], "--help").output.split())
    assert "auto (the model's own), float32, float16 (or fp16) or bfloat16 (or bf16)" in told


def test_an_unknown_dtype_is_told_all_names(folder: Path) -> None:
    told = str(run("profile", folder, "--device", "cpu", "--dtype", "fp8").exception)
    assert told == "--dtype takes auto, float32, float16, bfloat16, fp32, fp16 or bf16; got 'fp8'."


def test_a_file_for_json_that_is_printed(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    for command in (("inspect", folder), ("doctor",)):
        ran = run(*command, "--json", file)
        assert ran.exit_code == 2
        told = " ".join(ran.output.split())
        assert f"({file}). --json prints: " in told
        assert f"{command[0]} ... --json > FILE" in told
        ran = run(*command, file)
        assert ran.exit_code == 2
        assert ran.output.rstrip().endswith(f"Got unexpected extra argument(s) ({file}).")
    assert not file.exists()


@pytest.mark.parametrize("command", ["generate", "eval", "profile", "quantize"])
def test_a_model_of_another_kind(command: str, tmp_path: Path) -> None:
    folder, text = tmp_path / "t5", tmp_path / "words.txt"
    sizes = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "vocab_size": 72}
    build_with_tokenizer("llama", folder)
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(folder)
    text.write_text("w1 w2 " * 400)
    more = {"generate": ("w1",), "quantize": (tmp_path / "out", "--calibrate", text)}.get(command, ())
    refused = run(command, folder, *more)
    assert str(refused.exception) == (
        f"{folder} has a model of type 't5', and this takes causal language models (AutoModelForCausalLM). "
        "In Python its own class loads it, quantized or not."
    )
    assert not (tmp_path / "out").exists()


@pytest.fixture
def nothing_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of so many layers would be made until memory ends."""
    for kind in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"):
        monkeypatch.setattr(f"transformers.{kind}.from_pretrained", lambda *_, **__: pytest.fail("made"))


def promise(folder: Path, **settings: object) -> Path:
    """Change a folder's config."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize("command", ["generate", "eval", "profile", "serve"])
@pytest.mark.parametrize("part", [None, "text_config"])
def test_more_layers_than_there_are_tensors(command: str, part: str | None, tmp_path: Path) -> None:
    folder, count = build_with_tokenizer("llama", tmp_path / "model"), {"num_hidden_layers": 10**9}
    promise(folder, **({part: count} if part else count))
    told = str(
        run(command, folder, *{"generate": ("w1",), "serve": ("--port", 0)}.get(command, ())).exception
    )
    there = f"{folder / 'config.json'}: num_hidden_layers is 1000000000, and the folder has only 20 tensors."
    assert told == f"{there} Fetch config.json again, or correct it."


@pytest.mark.usefixtures("nothing_made")
def test_inspect_makes_no_model_of_more_layers_than_there_are_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would to say why a layer stayed unquantized; without, the table says the rest."""
    monkeypatch.setattr(leftovers, "LARGE", 1)
    build_with_tokenizer("llama", tmp_path / "in")
    quantize_files(tmp_path / "in", tmp_path / "out", QuantizationPolicy(bits=4))
    ran = run("inspect", promise(tmp_path / "out", num_hidden_layers=10**9))
    assert ran.exit_code == 0, ran.exception
    assert "unquantized model.norm" in ran.output


def test_experts_may_be_stacked_in_one_tensor(tmp_path: Path) -> None:
    save_file({"experts": torch.zeros(2000, 2, 2)}, tmp_path / "model.safetensors")
    refuse_more_than_tensors(tmp_path, {"num_experts": 2000, "vocab_size": 10**9})
    with pytest.raises(ValueError, match="num_experts is 2001, and the folder has only 1 tensor"):
        refuse_more_than_tensors(tmp_path, {"num_experts": 2001})


@pytest.mark.parametrize("is_moe", [False, True])
def test_experts_may_be_rows_or_none(is_moe: bool, tmp_path: Path) -> None:
    """Those of a Doge that has any are rows of two tables; one that has none says 16384 all the same."""
    sizes = {"vocab_size": 72, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = DogeConfig(**sizes, is_moe=is_moe)
    build_with_tokenizer("llama", tmp_path / "in")
    DogeForCausalLM(config).save_pretrained(tmp_path / "in")
    assert json.loads((tmp_path / "in" / "config.json").read_text())["num_experts"] == 16384
    ran = run("quantize", tmp_path / "in", tmp_path / "out")
    assert ran.exit_code == 0, ran.exception
    ran = run("generate", tmp_path / "out", "w1", "--max-new-tokens", 2)
    assert is_moe or ran.exit_code == 0, ran.exception  # transformers 5.17 runs no Doge with experts


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("eval", "--bits", "6"), "--bits takes"),
        (("eval", "--bits", "4", "--embedding-bits", 9), "embedding_bits must be one of (2, 3, 4, 5), got 9"),
        (("eval", "--dtype", "fp8"), "--dtype"),
        (("eval", "--text", "absent.txt"), "absent.txt"),
        (("eval", "--bits", "4", "--calibrate", "absent.txt"), "--calibrate absent.txt"),
        (("generate", "hi", "--dtype", "fp8"), "--dtype"),
        (("generate", "hi", "--device", "tpu"), "no device 'tpu'"),
        (("quantize", "out", "--device", "tpu"), "no device 'tpu'"),
        (("quantize", "out", "--calibrate", "absent.txt"), "--calibrate absent.txt"),
    ],
    ids=str,
)
def test_wrong_options_are_refused_before_a_model_is_fetched(
    command: tuple[object, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    refused = run(command[0], "some-org/some-model", *command[1:]).exception
    assert told in str(refused)


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (("eval", "folder", "--text", "FILE"), "text.txt"),
        (("eval", "folder", "--bits", "4", "--calibrate", "FILE"), "text.txt"),
        (("bench", "generate", "FILE", "--device", "cpu"), "opt.json"),
        (("bench", "model", "FILE", "--device", "cpu"), "opt.json"),
        (("bench", "quantize", "FILE"), "opt.json"),
        (("profile", "--random", "FILE"), "opt.json"),
    ],
    ids=str,
)
def test_results_are_not_written_over_what_is_read(
    command: tuple[str, ...], file: str, tmp_path: Path
) -> None:
    path = tmp_path / file
    path.write_text("precious")
    result = tmp_path / "." / file
    arguments = [str(path) if word == "FILE" else word for word in command]
    for ordered in ((*arguments, "--json", result), (arguments[0], "--json", result, *arguments[1:])):
        if arguments[0] == "bench" and ordered[1] == "--json":  # of the command, not of bench
            continue
        refused = run(*ordered).exception
        assert str(refused) == f"--json: {result} is read, too. Name another file."
    assert path.read_text() == "precious"
