"""The `kbit` command apart from quantize and bench: its frame, inspect, generate, eval and doctor."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import string
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

import kbit
import tiny_models
import warm_processes
from kbit import cli
from kbit.cli import app, doctor
from kbit.integrations.streaming import quantize_checkpoint
from kbit.nn import leftovers

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
TEXT = "the quick brown fox jumps over the lazy dog. " * 12


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return result.output


def refuse(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, ValueError | OSError), repr(result.exception)
    return str(result.exception)


def shell(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    words = ("-m", "kbit", *map(str, arguments))
    command = [sys.executable, *words] if environment else warm_processes.command(*words)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def save_tokenizer(folder: Path) -> None:
    """A token per character; the rest of the tiny vocabulary is never used."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    characters = ["<unk>", *string.ascii_lowercase, *" .,:<>?!'-"]
    model = models.WordLevel({token: index for index, token in enumerate(characters)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A tiny mixture of experts with a tokenizer, and the same at 4 bits with some layers at 2."""
    root = tmp_path_factory.mktemp("models")
    tiny_models.build("qwen3_moe", torch.bfloat16).save_pretrained(root / "original")
    save_tokenizer(root / "original")
    policy = kbit.QuantizationPolicy(bits=4, overrides={"experts": 2})
    quantize_checkpoint(root / "original", root / "quantized", policy)
    return {name: root / name for name in ("original", "quantized")}


# -- the frame -----------------------------------------------------------------------------------------------


def test_help_lists_the_commands_without_importing_transformers():
    commands = ("quantize", "inspect", "generate", "eval", "bench", "compile", "doctor", "demo")
    output = succeed("--help")
    assert all(command in output for command in commands)
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom kbit.cli import app\n"
        "CliRunner().invoke(app, ['--help'])\nprint('transformers' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_version():
    assert succeed("--version").strip() == f"kbit {kbit.__version__}"


def test_an_error_is_one_line_and_exit_code_1(tmp_path):
    result = shell("inspect", tmp_path / "[missing]")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert "[missing]" in result.stderr


def test_errors_of_the_system_name_the_file_and_a_remedy(folders, tmp_path):
    (tmp_path / "file").write_text("")
    result = shell("quantize", folders["original"], tmp_path / "file" / "out")
    assert result.returncode == 1
    assert result.stderr.startswith(f"error: {tmp_path / 'file'} cannot be written to: ")
    assert result.stderr.endswith("Write elsewhere.\n")
    with pytest.raises(OSError, match="Errno") as caught:
        (tmp_path / "file" / "out").mkdir()
    assert cli.escape(caught.value).startswith(f"{tmp_path / 'file' / 'out'}: ")
    assert "Errno" not in cli.escape(caught.value)
    assert "Is the path right" in cli.escape(caught.value)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--folder", __file__], 2, "is a file. Name a folder."),
        (["bench", "quantize", "llama-3-8b", "--folder", __file__], 2, "is a file. Name a folder."),
        (["bench", "quantize", "llama-3-8b", "--device", ""], 1, "no device to quantize on. Use cpu"),
        (["bench", "quantize", "llama-3-8b", "--device", "x"], 1, "no device 'x'. Use cpu"),
        (["bench", "cpu", "--threads", 100_000], 2, "1024"),
        (
            ["bench", "cpu", "-m", "1,0"],
            1,
            "--rows takes positive whole numbers below 10^9, such as",
        ),
        (["bench", "cpu", "--bits", 6], 1, "--bits takes 2, 3, 4, 5, joined by commas; got '6'"),
        (["bench", "report", "--out", Path(__file__).parent], 2, "is a folder. Name a file in it."),
        (["tune", "--out", Path(__file__).parent], 2, "is a folder. Name a file in it."),
        (["generate", "somewhere", "hi", "--seed", 10**30], 2, "--seed"),
        (["generate", "somewhere", "hi", "--temperature", 1e-300], 1, "Use 0, which decodes greedily"),
        (["generate", "somewhere", "hi", "--top-p", 0.9], 1, "Add --temperature, such as 0.8"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(arguments, code, message):
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert message in f"{' '.join(result.output.split())} {result.exception}"


@pytest.mark.parametrize("damage", ["weights", "config"])
def test_damaged_models_are_errors_without_traceback(folders, tmp_path, damage):
    model = tmp_path / "model"
    shutil.copytree(folders["original"], model)
    if damage == "weights":
        file = model / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    else:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"hidden_size": "many"}))
    result = shell("generate", model, "hello")
    assert result.returncode == 1
    assert "error: " in result.stderr
    assert "Traceback" not in result.stderr


def altered(folders, tmp_path, which="original", **settings) -> Path:
    """A copy of a model with other settings in its config."""
    folder = shutil.copytree(folders[which], tmp_path / "altered")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"hidden_act": "foo"},
            "altered: its model .* does not know the hidden_act 'foo' of its config.json",
        ),
        (
            {"quantization_config": [1]},
            "altered/config.json: quantization_config must be an object, got list",
        ),
        ({"quantization_config": []}, "json: quantization_config must be an object, got list"),
        ({"quantization_config": {"quant_method": "foo"}, "num_hidden_layers": 3}, "no weights for 11 param"),
        ({"vocab_size": "x"}, "altered: its config.json cannot be loaded: .* expected int, got str"),
        (
            {"hidden_size": 64},
            "altered: its model cannot be loaded: its config.json gives some weights other",
        ),
        ({"model_type": "t5"}, "altered has a model of type 't5', and this takes causal language models"),
        (
            {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}},
            "altered: its (model|tokenizer) cannot be loaded: it needs code of its own",
        ),
    ],
)
def test_a_config_that_transformers_cannot_use_is_one_line(folders, tmp_path, settings, message):
    for command in (("generate", "hello"), ("eval",)):
        folder = altered(folders, tmp_path / command[0], **settings)
        assert re.search(message, refuse(command[0], folder, *command[1:]))


def test_a_config_may_say_that_nothing_is_quantized(folders, tmp_path):
    folder = altered(folders, tmp_path, quantization_config=None)
    succeed("generate", folder, "hello", "--max-new-tokens", 2)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", '{"a":'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", '{"a":'),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_a_damaged_tokenizer_is_one_line(folders, tmp_path, file, content):
    folder = altered(folders, tmp_path)
    (folder / file).write_text(content)
    message = refuse("generate", folder, "hello")
    assert f"{folder}: its tokenizer cannot be loaded" in message
    assert message.endswith("Fetch tokenizer.json and tokenizer_config.json again.")


def test_a_damaged_chat_template_is_one_line(folders, tmp_path):
    folder = altered(folders, tmp_path)
    (folder / "chat_template.jinja").write_text("{% for")
    assert "use --no-chat" in refuse("generate", folder, "hello")


@pytest.mark.parametrize("command", ["generate", "eval", "serve"])
def test_pickled_weights_are_refused(folders, tmp_path, command):
    folder = altered(folders, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    extra = ["hello"] if command == "generate" else []
    assert "pickled weights only (pytorch_model.bin)" in refuse(command, folder, *extra)


@pytest.mark.parametrize("dtype", ["foo", "float64", "", "nn"])
@pytest.mark.parametrize("command", ["generate", "profile"])
def test_other_dtypes_are_refused(folders, command, dtype):
    extra = ["hello"] if command == "generate" else []
    message = refuse(command, folders["original"], *extra, "--dtype", dtype)
    assert f"--dtype takes auto, float32, float16, bfloat16, fp32, fp16 or bf16; got {dtype!r}" in message


@pytest.mark.parametrize("device", ["foo", "cuda:x", "", "-1", "meta", "xpu"])
def test_other_devices_are_refused(folders, device):
    message = refuse("generate", folders["original"], "hello", "--device", device)
    assert f"no device {device!r}. Use cpu, cuda or cuda:1." in message


def test_debug_shows_the_traceback(tmp_path):
    result = shell("--debug", "inspect", tmp_path / "missing")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_a_missing_package_is_named_with_its_remedy(folders, tmp_path):
    code = "raise ModuleNotFoundError(\"No module named 'transformers'\", name='transformers')"
    (tmp_path / "transformers.py").write_text(code)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    for command in (("generate", folders["original"], "hello"), ("eval", folders["original"])):
        result = shell(*command, PYTHONPATH=path)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1, result.stderr
        assert "No module named 'transformers'" in result.stderr
        assert "pip install transformers" in result.stderr


def test_a_bad_option_is_a_usage_error():
    assert run("quantize", "--bits", "many", "a", "b").exit_code == 2
    assert run("no-such-command").exit_code == 2


# -- inspect -------------------------------------------------------------------------------------------------


def inspected(*arguments: object) -> dict[str, dict]:
    return {row["name"]: row for row in json.loads(succeed("inspect", *arguments, "--json"))}


def test_inspect_counts_what_is_stored(folders):
    rows = inspected(folders["quantized"])
    attention = rows["model.layers.0.self_attn.q_proj"]
    assert (attention["bits"], attention["tensors"]) == (4, 1)
    experts = rows["model.layers.0.mlp.experts"]
    assert (experts["bits"], experts["tensors"]) == (2, 4 * 3)
    assert rows["model.embed_tokens.weight"]["bits"] is None
    stored = sum(tensor.nbytes for tensor in load_file(folders["quantized"] / "model.safetensors").values())
    assert sum(row["bytes"] for row in rows.values()) == stored


def test_inspect_computes_errors_against_the_original(folders):
    rows = inspected(folders["quantized"], "--source", folders["original"])
    original = load_file(folders["original"] / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj"
    w = original[f"{name}.weight"]
    decoded = kbit.dequantize(kbit.quantize(w, 4))
    error = float((decoded - w.float()).square().sum())
    assert rows[name]["nmse"] == pytest.approx(error / float(w.float().square().sum()))
    assert rows[name]["sqnr_db"] == pytest.approx(-10 * math.log10(rows[name]["nmse"]))
    assert rows["model.embed_tokens.weight"]["nmse"] is None
    assert rows[name]["weights"] == w.numel()
    # 16 bits of scale and 32 k of codes per 48 weights would be (64 k + 16) / 48: rows are padded to 64.
    assert rows[name]["bits_per_weight"] == pytest.approx((64 * 4 + 2 * 8) / 48)


def test_inspect_prints_a_table(folders):
    output = succeed("inspect", folders["quantized"], "--source", folders["original"])
    for text in ("SQNR", "all 4-bit", "all 2-bit", "unquantized", "self_attn"):
        assert text in output
    assert "all 4-bit" not in succeed("inspect", folders["original"])


def test_inspect_points_out_large_unquantized_parameters(folders, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    output = succeed("inspect", folders["quantized"])
    assert re.search("unquantized model.embed_tokens.weight: .* MB: the default; --embedding-bits 5 ", output)


def test_inspect_of_a_config_that_says_that_nothing_is_quantized(folders, tmp_path):
    for name in ("original", "quantized"):
        file = shutil.copytree(folders[name], tmp_path / name) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": None}))
    assert inspected(tmp_path / "original") == inspected(folders["original"])
    assert "are k-bit codes, but config.json has no" in refuse("inspect", tmp_path / "quantized")


def test_inspect_refuses_what_does_not_fit(folders, tmp_path):
    assert "not quantized" in refuse("inspect", folders["original"], "--source", folders["quantized"])
    quantized = folders["quantized"]
    assert f"--source {quantized} is quantized. Give" in refuse("inspect", quantized, "--source", quantized)
    other = shutil.copytree(folders["original"], tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert "q_proj" in refuse("inspect", quantized, "--source", other)
    broken = shutil.copytree(quantized, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes((broken / "model.safetensors").read_bytes()[:-1])
    assert "truncated" in refuse("inspect", broken)


@pytest.mark.parametrize("command", ["inspect", "generate", "eval"])
def test_a_checkpoint_of_other_bits_than_its_config_is_refused(folders, tmp_path, command):
    lying = shutil.copytree(folders["quantized"], tmp_path / "lying")
    config = json.loads((lying / "config.json").read_text())
    config["quantization_config"]["bits"] = 3
    (lying / "config.json").write_text(json.dumps(config))
    extra = ["hello"] if command == "generate" else []
    assert "at 3 bits" in refuse(command, lying, *extra)


# -- generate ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["original", "quantized"])
def test_generate_streams_what_the_model_says(folders, which):
    arguments = ("generate", folders[which], "hello", "--max-new-tokens", 8, "--dtype", "fp32")
    output = succeed(*arguments)
    tokenizer = AutoTokenizer.from_pretrained(folders[which])
    ids = tokenizer("<user>hello>", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folders[which], dtype=torch.float32)
    answer = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert tokenizer.decode(answer, skip_special_tokens=True).strip() in output
    assert "tokens/s" in output
    assert strip_speed(succeed(*arguments)) == strip_speed(output)


def strip_speed(output: str) -> list[str]:
    return [line for line in output.splitlines() if "tokens/s" not in line and "Loading" not in line]


def test_generate_samples_by_seed_and_without_template(folders):
    options = ("--max-new-tokens", 12, "--temperature", 2.0, "--no-chat")
    sample = ("generate", folders["quantized"], "hi", *options)
    one, two, three = (strip_speed(succeed(*sample, "--seed", seed)) for seed in (1, 1, 2))
    assert one == two
    assert one != three


def test_generate_says_what_is_missing(folders, tmp_path):
    shutil.copytree(folders["original"], tmp_path / "model", ignore=shutil.ignore_patterns("*token*"))
    assert "has no tokenizer" in refuse("generate", tmp_path / "model", "hello")
    assert "has no tokens" in refuse("generate", folders["original"], "", "--no-chat")
    message = refuse("generate", folders["original"], "hello", "--system", "Be short.", "--no-chat")
    assert message.startswith("--system needs a chat template, and --no-chat leaves it out. ")
    assert "no device 'cuda:99'" in refuse("generate", folders["original"], "hello", "--device", "cuda:99")


def test_generate_refuses_a_folder_that_is_no_model(tmp_path):
    assert "is not a folder. Give a model's folder, or" in refuse("generate", tmp_path / "missing", "hello")
    assert "no config.json" in refuse("generate", tmp_path, "hello")


# -- eval ----------------------------------------------------------------------------------------------------


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def scored(tmp_path: Path, *arguments: object) -> list[dict]:
    succeed("eval", *arguments, "--json", tmp_path / "result.json")
    content = (tmp_path / "result.json").read_text()
    assert str(tmp_path.parent) not in content, "a result file names no folder of this machine"
    return json.loads(content)["rows"]


def test_eval_against_the_original(folders, text, tmp_path):
    options = ("--text", text, "--window", 64)
    reference, row = scored(tmp_path, folders["quantized"], "--reference", folders["original"], *options)
    assert reference["kl_divergence"] is None
    assert row["kl_divergence"] > 0
    assert row["tokens"] == (len(TEXT) // 64) * 63
    assert 2.25 < row["bits_per_weight"] < 7
    assert 0 < row["nmse"] < 0.2
    (alone,) = scored(tmp_path, folders["quantized"], *options)
    assert alone["perplexity"] == pytest.approx(row["perplexity"])
    assert alone["kl_divergence"] is None


def test_eval_computes_perplexity_as_the_model_does(folders, text, tmp_path):
    (row,) = scored(tmp_path, folders["original"], "--text", text, "--window", 64)
    ids = AutoTokenizer.from_pretrained(folders["original"])(TEXT, return_tensors="pt").input_ids[0]
    model = AutoModelForCausalLM.from_pretrained(folders["original"], dtype=torch.float32)
    batch = ids[: len(ids) // 64 * 64].view(-1, 64)
    with torch.inference_mode():
        assert row["perplexity"] == pytest.approx(math.exp(float(model(batch, labels=batch).loss)), rel=1e-5)


def test_eval_quantizes_in_memory(folders, text, tmp_path):
    options = ("--bits", "2,4", "--plain", "--text", text, "--window", 64, "--max-tokens", 256)
    base, *rows = scored(tmp_path, folders["original"], *options, "--calibrate", text)
    assert base["kl_divergence"] is None
    assert [row["bits"] for row in rows] == [2, 2, 2, 4, 4, 4]
    assert [row["method"] for row in rows] == 2 * ["plain", "search", "calibrated"]
    errors = {(row["bits"], row["method"]): row["nmse"] for row in rows}
    assert errors[2, "search"] < errors[2, "plain"]
    assert errors[4, "search"] < errors[4, "plain"] < errors[2, "search"]
    assert errors[2, "search"] < errors[2, "calibrated"]
    assert 0 < rows[2]["kl_divergence"] < rows[1]["kl_divergence"] < rows[0]["kl_divergence"]
    # In memory and from disk is one and the same quantizer.
    quantize_checkpoint(folders["original"], tmp_path / "two", kbit.QuantizationPolicy(bits=2))
    saved = scored(tmp_path, tmp_path / "two", "--reference", folders["original"], *options[3:])[1]
    in_memory = rows[1]
    for key in ("perplexity", "kl_divergence", "nmse", "bits_per_weight"):
        assert saved[key] == pytest.approx(in_memory[key], rel=1e-6), key


def test_eval_of_an_nvfp4_model(folders, text, tmp_path):
    config = kbit.NVFP4Config(activations="16bit")
    model = AutoModelForCausalLM.from_pretrained(folders["original"], quantization_config=config)
    model.save_pretrained(tmp_path / "nvfp4")
    save_tokenizer(tmp_path / "nvfp4")
    options = ("--text", text, "--window", 64, "--max-tokens", 128, "--json", tmp_path / "result.json")
    # In a process of its own, where nothing but the command has asked for kbit's part of transformers.
    result = shell("eval", tmp_path / "nvfp4", "--reference", folders["original"], *options)
    assert result.returncode == 0, result.stderr
    assert "on a CPU NVFP4 runs by its reference" in result.stderr
    base, row = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert row["perplexity"] == pytest.approx(base["perplexity"], rel=0.1)
    assert 0 < row["kl_divergence"] < 0.05
    assert 0 < row["nmse"] < 0.02
    assert 4.5 <= row["bits_per_weight"] < 6  # 48 features are padded to 64
    assert "is quantized" in refuse("eval", tmp_path / "nvfp4", "--bits", "4", "--text", text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--plain"], "Add --bits"),
        (["--embedding-bits", 4], "Add --bits"),
        (["--peers"], "Add --bits"),
        (["--bits", 4, "--reference", "somewhere"], "Drop --reference"),
    ],
)
def test_eval_refuses_options_that_would_do_nothing(folders, options, message):
    assert message in refuse("eval", folders["original"], *options)


@pytest.mark.parametrize("options", [[], ["--bits", 4]])
def test_eval_names_the_folder_it_is_in(folders, text, tmp_path, monkeypatch, options):
    monkeypatch.chdir(folders["original"])
    rows = scored(tmp_path, ".", "--text", text, "--window", 64, "--max-tokens", 64, *options)
    assert all(row["model"].startswith("original") for row in rows)


def test_eval_uses_the_shipped_text(folders):
    assert "windows of 32" in succeed("eval", folders["quantized"], "--window", 32, "--max-tokens", 64)


def test_eval_refuses_what_it_cannot_score(folders, text, tmp_path):
    quantized, original = folders["quantized"], folders["original"]
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    assert "tokens" in refuse("eval", original, "--text", tmp_path / "empty.txt")
    assert "UTF-8" in refuse("eval", original, "--text", tmp_path / "latin.txt")
    for unreadable in (tmp_path / "nothing.txt", tmp_path):
        message = refuse("eval", original, "--text", unreadable)
        assert f"--text {unreadable} cannot be read" in message
        assert "leave --text out" in message
    assert "--bits takes" in refuse("eval", original, "--bits", "2-5", "--text", text)
    assert "--bits takes 2, 3, 4, 5" in refuse("eval", original, "--bits", "6", "--text", text)
    with mock.patch("transformers.AutoModelForCausalLM.from_pretrained", side_effect=AssertionError):
        assert "is quantized. Give the unquantized model, or drop --bits" in refuse(
            "eval", quantized, "--bits", "4", "--text", text
        )
    assert "is quantized. Give --reference the folder" in refuse(
        "eval", quantized, "--reference", quantized, "--text", text
    )


# -- doctor --------------------------------------------------------------------------------------------------


def test_doctor_finds_this_machine_fit():
    findings = {row["what"]: row for row in json.loads(succeed("doctor", "--json"))}
    assert findings["torch"]["found"].startswith(torch.__version__.split("+")[0])  # "+cu130" may be missing
    assert {"python", "transformers", "cpu", "cpu kernels", "threads", "gpu", "cache folder"} <= set(findings)
    assert "cpu kernels" in succeed("doctor")


def test_doctor_reads_the_settings(monkeypatch):
    monkeypatch.setenv("KBIT_BACKEND", "cpu")
    monkeypatch.setenv("KBIT_KERNEL", "strem")
    monkeypatch.setenv("KBIT_SPEED", "11")
    (row,) = (row for row in json.loads(succeed("doctor", "--json")) if row["what"] == "settings")
    assert "KBIT_BACKEND=cpu" in row["found"]
    assert "KBIT_KERNEL may be stream, grouped, resident, wgmma, mma, cublas." in row["remedy"]
    assert "Nothing reads KBIT_SPEED" in row["remedy"]
    assert "KBIT_BACKEND may" not in row["remedy"]


def test_serve_refuses_what_is_no_model(tmp_path):
    assert "no config.json" in refuse("serve", tmp_path)
    assert "is not a folder" in refuse("serve", tmp_path / "missing")
    assert "is not a folder" in refuse("serve", "model-4bits")  # and not looked for on a hub


def test_doctor_prints_remedies_whole(monkeypatch):
    # rich takes what stands in brackets for markup, and pip's extras stand in brackets.
    finding = doctor.__globals__["Finding"]("driver", "none [yet]", "pip install 'some[extra]'", False)
    monkeypatch.setitem(doctor.__globals__, "CHECKS", (lambda: finding,))
    output = succeed("doctor")
    assert "some[extra]" in output
    assert "none [yet]" in output


def test_doctor_fails_where_kbit_cannot_run(monkeypatch):
    missing = doctor.__globals__["_package"]("no-such-package-at-all")
    monkeypatch.setitem(doctor.__globals__, "CHECKS", (missing,))
    result = run("doctor")
    assert result.exit_code == 1
    assert "pip install" in result.output


def test_doctor_says_why_kernels_are_missing(monkeypatch):
    from kbit.backends import cpu

    monkeypatch.setattr(cpu, "available", lambda: False)
    monkeypatch.setattr(cpu, "unavailable_reason", lambda: "no compiler when it was installed")
    result = run("doctor", "--json")
    assert result.exit_code == 0, "slow is not broken"
    (kernels,) = (row for row in json.loads(result.output) if row["what"] == "cpu kernels")
    assert "no compiler" in kernels["found"]
    assert "g++" in kernels["remedy"]


def test_an_unsupported_instruction_set_is_explained():
    result = shell("doctor", KBIT_CPU_ISA="sse2")
    assert "Traceback" not in result.stderr
    assert result.returncode == (1 if cpu_available() else 0)
    if cpu_available():
        assert "sse2" in result.stdout


def cpu_available() -> bool:
    from kbit.backends import cpu

    return cpu.available()


def test_doctor_reports_an_unwritable_cache(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    findings = {row["what"]: row for row in json.loads(run("doctor", "--json").output)}
    assert "XDG_CACHE_HOME" in findings["cache folder"]["remedy"]
