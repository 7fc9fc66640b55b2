"""`kbit quantize`: what it refuses before it writes anything, and what is left where it fails."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import kbit
import tiny_models
from kbit.format.checkpoint import validate_checkpoint
from kbit.format.model_files import JOURNAL_NAME, read_config, read_index
from kbit.integrations import streaming
from kbit.integrations.streaming import folder as work_folder
from quantize_runs import altered, content, fail_at, refuse, run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "source"
    tiny_models.build("qwen3_moe", torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    return folder


@pytest.mark.parametrize("wrapped", [False, True], ids=["from the system", "from the library"])
def test_disk_full(source, tmp_path, small_shards, monkeypatch, wrapped):
    from safetensors import SafetensorError

    with monkeypatch.context() as patch:
        text = "I/O error: No space left on device (os error 28)"
        full = OSError(errno.ENOSPC, "No space left on device")
        fail_at(patch, 3, SafetensorError(text) if wrapped else full)
        message = refuse(source, tmp_path / "out")
    for part in ("No space left", str(tmp_path / "out.partial"), "keeps 2 finished shards", "run the same"):
        assert part in message
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "out.partial").glob("*.writing"))
    for folder in ("out", "out.partial"):
        with pytest.raises(ValueError, match="out.partial is of a kbit quantize that did not end"):
            read_config(tmp_path / folder)
    result = run(source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    validate_checkpoint(tmp_path / "out")


def test_a_kernel_that_is_refused_leaves_finished_shards(source, tmp_path, small_shards, monkeypatch):
    quantize, calls = streaming.ops.quantize, []

    def some(*args, **kwargs):
        calls.append(1)
        if len(calls) > 20:
            raise kbit.KbitError("the driver refused a launch.")
        return quantize(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(streaming.ops, "quantize", some)
        assert "the driver refused" in refuse(source, tmp_path / "out")
    assert any((tmp_path / "out.partial").glob("*.safetensors"))
    result = run(source, tmp_path / "out")
    assert result.exit_code == 0, result.output


def test_disk_full_before_the_first_shard_is_finished(source, tmp_path, monkeypatch):
    fail_at(monkeypatch, 1, OSError(errno.ENOSPC, "No space left on device"))
    message = refuse(source, tmp_path / "out")
    assert "No space left" in message
    assert "Nothing is left behind" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        ("tokenizer.json", "copying {source}/tokenizer.json to {out}.partial/tokenizer.json failed"),
        ("config.json", "writing {out}.partial/config.json failed"),
    ],
)
def test_errors_of_other_files_name_them(source, tmp_path, monkeypatch, failing, words):
    copy, write = shutil.copyfile, Path.write_text

    def copyfile(one, other):
        if one.name == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(one), None, str(other))
        return copy(one, other)

    def write_text(path, text):
        if path.name == failing:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", copyfile)
        patch.setattr(Path, "write_text", write_text)
        message = refuse(source, tmp_path / "out")
    assert words.format(source=source, out=tmp_path / "out") in message
    assert "keeps 1 finished shard of" in message
    result = run(source, tmp_path / "out")
    assert "1 of them from before" in result.output.replace("\n", " ")


def test_a_source_that_cannot_be_read_is_named(source, tmp_path, monkeypatch):
    def fail(name, info, *rest):
        raise OSError(errno.EIO, "Input/output error", str(info.file))

    monkeypatch.setattr(streaming, "read_tensor", fail)
    assert f"reading {source}/model.safetensors failed: Input" in refuse(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_said_before_anything_is_written(source, tmp_path, monkeypatch):
    real = shutil.disk_usage
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda path: real(path)._replace(free=1000))
    assert "0 MB free, the output needs 17 MB." in refuse(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_nan_is_named_and_nothing_is_left(source, tmp_path, small_shards):
    shutil.copytree(source, tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5:8] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    save_file(tensors, file, metadata={"format": "pt"})
    message = refuse(tmp_path / "in", tmp_path / "out")
    assert name in message
    assert " 3 NaN or Inf" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_existing_output(source, tmp_path):
    assert run(source, tmp_path / "out").exit_code == 0
    assert "--force" in refuse(source, tmp_path / "out")
    assert validate_checkpoint(tmp_path / "out").bits == 4
    assert run(source, tmp_path / "out", "--bits", 2, "--force").exit_code == 0
    assert validate_checkpoint(tmp_path / "out").bits == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_link_to_nothing_is_refused_before_the_work(source, tmp_path, force):
    (tmp_path / "out").symlink_to(tmp_path / "gone")
    assert "out is a link to nothing" in refuse(source, tmp_path / "out", *force)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_force_stops_before_a_folder_that_is_in_its_way(source, tmp_path):
    streaming.quantize_checkpoint(source, tmp_path / "out", kbit.QuantizationPolicy(bits=4))
    (tmp_path / "out.replaced").mkdir()
    assert "out.replaced is in the way" in refuse(source, tmp_path / "out", "--force")
    assert not (tmp_path / "out.partial").exists()
    (tmp_path / "out").rename(tmp_path / "out.partial")  # as a run leaves it that ends between renamings
    assert "out.replaced is in the way" in refuse(source, tmp_path / "out", "--force")


def test_what_was_replaced_and_cannot_be_removed_is_named(source, tmp_path, monkeypatch):
    streaming.quantize_checkpoint(source, tmp_path / "out", kbit.QuantizationPolicy(bits=4))
    rmtree = mock.Mock(side_effect=PermissionError(13, "Permission denied"))
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.warns(
        UserWarning, match=r"out is complete, but .*out\.replaced, .*Permission denied. Remove it"
    ):
        streaming.quantize_checkpoint(source, tmp_path / "out", kbit.QuantizationPolicy(bits=2), force=True)
    assert read_config(tmp_path / "out")["quantization_config"]["bits"] == 2
    assert (tmp_path / "out.replaced").is_dir()


def test_force_replaces_a_link_and_not_what_it_points_to(source, tmp_path):
    policy = kbit.QuantizationPolicy(bits=4)
    streaming.quantize_checkpoint(source, tmp_path / "elsewhere", policy)
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    streaming.quantize_checkpoint(source, tmp_path / "out", policy, force=True)
    assert not (tmp_path / "out").is_symlink()
    assert validate_checkpoint(tmp_path / "out") == validate_checkpoint(tmp_path / "elsewhere") == policy
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "out"]


def test_the_old_folder_comes_back_if_the_new_one_cannot_take_its_name(source, tmp_path, monkeypatch):
    streaming.quantize_checkpoint(source, tmp_path / "out", kbit.QuantizationPolicy(bits=4))
    replace = Path.replace

    def fail(path, target):
        if path.name == "out.partial":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", fail)
    message = refuse(source, tmp_path / "out", "--bits", 2, "--force")
    assert "out.partial is complete but cannot be renamed to" in message
    assert validate_checkpoint(tmp_path / "out").bits == 4
    assert validate_checkpoint(tmp_path / "out.partial").bits == 2


def test_what_cannot_be_replaced_as_a_whole(source, tmp_path, monkeypatch):
    here = tmp_path / "model" / "here"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    for target in (".", "..", "x/..", here, here.parent):
        assert "cannot be replaced. Name a folder" in refuse(source, target, "--force"), target
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} cannot be written to: " in refuse(source, tmp_path / "file" / "out")
    assert not list(here.iterdir())


def test_force_never_destroys_what_is_no_model_folder(source, tmp_path):
    shutil.copytree(source, tmp_path / "in")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    for options in ((), ("--force",)):
        assert "exists and is not a model folder" in refuse(tmp_path / "in", tmp_path / "home", *options)
    assert "overlap" in refuse(tmp_path / "in", tmp_path / "in", "--force")
    assert "overlap" in refuse(tmp_path / "in", tmp_path / "in" / "out")
    assert "overlap" in refuse(tmp_path / "in", tmp_path, "--force")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "letter.txt").write_text("dear")
    assert "not made by kbit" in refuse(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out.partial" / "letter.txt").is_file()
    assert (tmp_path / "home" / "letter.txt").is_file()
    assert content(tmp_path / "home") == {"letter.txt": b"dear"}
    assert (tmp_path / "in" / "model.safetensors").is_file()


@pytest.mark.parametrize("text", ['{"theme": "dark"}', "[]", "{"])
def test_force_never_destroys_another_programs_folder(text, source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(text)
    assert "exists and is not a model folder" in refuse(source, other, "--force")
    assert content(other) == {"config.json": text.encode()}


def test_force_never_destroys_what_is_beside_a_model(source, tmp_path):
    target = shutil.copytree(source, tmp_path / "out")
    for name in (".cache", "additional_chat_templates", ".git"):
        (target / name).mkdir()
    for options in ((), ("--force",)):
        message = refuse(source, target, *options)
        assert "out exists and has folders that are no part of a model: .git. Choose another name" in message
    assert (target / ".git").is_dir()
    (target / ".git").rmdir()
    assert run(source, target, "--force").exit_code == 0
    assert validate_checkpoint(target).bits == 4


@pytest.mark.parametrize("name", ["out", "out.partial", "out.partial/run.json"])
def test_a_summary_in_the_place_of_the_output(name, source, tmp_path):
    (tmp_path / "out.partial").mkdir()
    if "/" not in name:
        (tmp_path / "out.partial").rmdir()
    message = refuse(source, tmp_path / "out", "--json", tmp_path / name)
    assert message.startswith(f"--json: {tmp_path / name} is where {tmp_path / 'out'} is written.")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--calibrate", "--codebook"])
def test_a_summary_in_the_place_of_an_input(option, source, tmp_path):
    file = tmp_path / "given.json"
    file.write_text(json.dumps([-1.0, -0.5, 0.5, 1.0]))
    options = (option, file, "--bits", 2, "--json", file)
    assert "given.json is read, too. Name another file." in refuse(source, tmp_path / "out", *options)


def test_a_model_without_a_tokenizer_is_said_to_have_none(source, tmp_path):
    assert "has no tokenizer" not in run(source, tmp_path / "with").output
    shutil.copytree(source, tmp_path / "in", ignore=shutil.ignore_patterns("tokenizer*"))
    ran = run(tmp_path / "in", tmp_path / "out")
    assert ran.exit_code == 0
    assert f"{tmp_path / 'out'} has no tokenizer, which kbit generate and kbit serve need." in ran.output


def test_an_override_that_names_a_weight_gets_suggestions(source, tmp_path):
    ran = run(source, tmp_path / "out", "--override", r"layers\.0\.self_atn\.q_proj\.weight$=3")
    assert "(nearest: model.layers.*.self_attn.q_proj, " in ran.output


@pytest.mark.parametrize("color", ["", "1"])  # "1" is a terminal to rich
def test_an_error_has_no_progress_bar_above_it(tmp_path, color):
    command = [sys.executable, "-m", "kbit", "quantize", str(tmp_path / "nothing"), str(tmp_path / "out")]
    env = os.environ | {"FORCE_COLOR": color, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1, result.stderr
    assert "bytes" not in result.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "llama"}, "module 'torch' has no attribute 'llama'"),
        ({"vocab_size": "x"}, "Field 'vocab_size' expected int, got str"),
        ({"hidden_act": "foo"}, "KeyError: 'foo'"),
        ({"architectures": [True]}, "attribute name must be string"),
        ({"model_type": "own", "architectures": ["Own"]}, "does not recognize this architecture"),
    ],
)
def test_a_config_that_makes_no_model_is_named(source, tmp_path, settings, message):
    folder = altered(source, tmp_path / "in", lambda config, tensors: config.update(settings))
    told = refuse(folder, tmp_path / "out")
    assert f"{folder}/config.json: transformers makes no model of this config: " in told
    assert message in told
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_code_of_a_folder_is_not_run_and_nobody_is_asked(source, tmp_path, monkeypatch):
    """transformers asks on a terminal unless it is told not to trust the code."""
    own = {"model_type": "own", "architectures": ["Own"], "auto_map": {"AutoConfig": "own.Own"}}
    folder = altered(source, tmp_path / "in", lambda config, tensors: config.update(own))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert "it needs code of its own (auto_map), and kbit runs none" in refuse(folder, tmp_path / "out")


def test_a_journal_that_is_no_text_is_begun_anew(source, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / JOURNAL_NAME).write_bytes(b"\xff\x00")
    assert run(source, tmp_path / "out").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_bad_sources(source, tmp_path):
    assert "missing" in refuse(tmp_path / "missing", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "config.json" in refuse(tmp_path / "empty", tmp_path / "out")
    shutil.copytree(source, tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    assert "pickle" in refuse(tmp_path / "pickled", tmp_path / "out")
    shutil.copytree(source, tmp_path / "short")
    whole = (source / "model.safetensors").read_bytes()
    (tmp_path / "short" / "model.safetensors").write_bytes(whole[:-100])
    assert "truncated" in refuse(tmp_path / "short", tmp_path / "out")
    assert run(source, tmp_path / "done").exit_code == 0
    assert "quantized already" in refuse(tmp_path / "done", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c, t: t.pop("model.layers.1.mlp.up_proj.weight"),
            "missing: model.layers.1.mlp.up_proj.weight.",
        ),
        (lambda c, t: t.pop("lm_head.weight"), "missing: lm_head.weight."),
        (lambda c, t: t.pop(EXPERT), "do not fit together: model.layers.0.mlp.experts.gate_up_proj."),
        (lambda c, t: t.update({EXPERT: torch.zeros(5, 48)}), "model.layers.0.mlp.experts.gate_up_proj."),
        (lambda c, t: c.update(num_hidden_layers=3), "missing: model.layers.2.input_layernorm.weight, "),
        (lambda c, t: c.update(hidden_size=40), "lm_head.weight is [72, 48] and not [72, 40]"),
    ],
)
def test_tensors_that_are_not_those_of_the_config(source, tmp_path, change, message):
    text = refuse(altered(source, tmp_path / "in", change), tmp_path / "out")
    assert message in text
    assert "Qwen3MoeForCausalLM" in text
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.mark.parametrize("part", ["_scale", "_packed", "_absmax"])
def test_what_a_reader_would_take_for_a_part_is_refused(part, source, tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"
    changed = altered(source, tmp_path / "in", lambda c, t: t.update({name + part: torch.tensor(0.5)}))
    message = refuse(changed, tmp_path / "out")
    assert f"{name}{part} has the name of a part of {name}" in message
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert run(changed, tmp_path / "out", "--skip", name.removesuffix(".weight")).exit_code == 0


@pytest.mark.parametrize("by_its_other_name", [True, False])
def test_parts_that_would_not_be_found_are_not_written(by_its_other_name, tmp_path, monkeypatch):
    """As in DeepSeek-V4: a pattern of transformers that is for the whole name of a tensor."""
    from transformers.core_model_loading import WeightRenaming

    from kbit.integrations.transformers import names, rehearsal

    renamings = [(r"model\.unembed\.weight$", "lm_head.weight")]
    renamings += [] if by_its_other_name else [(r"lm_head\.weight_packed", "model.norm.weight")]

    def mapping(model, **kwargs):
        return [WeightRenaming(*each) for each in renamings]

    for module in (names, rehearsal):
        monkeypatch.setattr(module, "get_model_conversion_mapping", mapping)
    whole = tmp_path / "whole"
    tiny_models.build("qwen3", torch.bfloat16).save_pretrained(whole)
    altered(whole, tmp_path / "in", lambda c, t: t.update({"model.unembed.weight": t.pop("lm_head.weight")}))
    if by_its_other_name:
        assert run(tmp_path / "in", tmp_path / "out", "--embedding-bits", 5).exit_code == 0
        assert "lm_head.weight_packed" in read_index(tmp_path / "out")
        validate_checkpoint(tmp_path / "out")
        return
    message = refuse(tmp_path / "in", tmp_path / "out", "--embedding-bits", 5)
    assert "part model.unembed.weight_packed" in message
    assert "--skip model.unembed" in message
    options = ("--embedding-bits", 5, "--skip", "model.unembed")
    assert run(tmp_path / "in", tmp_path / "out", *options).exit_code == 0


@pytest.mark.parametrize(
    ("architecture", "change", "unused"),
    [
        ("llama", lambda c, t: c.update(num_hidden_layers=1), "model.layers.1.input_layernorm.weight, "),
        ("qwen3_next", lambda c, t: t.update({"mtp.fc.weight": torch.ones(9, 9)}), None),
        ("llama", lambda c, t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}), None),
        ("llama", lambda c, t: t.update({"model.rotary_emb.inv_freq": torch.ones(8)}), None),
    ],
)
def test_tensors_that_the_model_does_not_use(tmp_path, architecture, change, unused):
    tiny_models.build(architecture, torch.bfloat16).save_pretrained(tmp_path / "whole")
    result = run(altered(tmp_path / "whole", tmp_path / "in", change), tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"does not use: {unused}" in result.output if unused else "does not use" not in result.output
    validate_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bits", "7"], "bits must be"),
        (["--override", "down_proj"], "REGEX=BITS"),
        (["--override", "down_proj=x"], "REGEX=BITS"),
        (["--override", "down_proj=\N{SUPERSCRIPT TWO}"], "REGEX=BITS"),
        (["--override", "=5"], "REGEX=BITS"),
        (["--override", "down_proj=3", "--override", "down_proj=5"], "twice"),
        (["--override", "(=4"], "regular expression"),
        (["--override", "down_proj=6"], "must be one of (2, 3, 4, 5)"),
        (["--override", ".=0"], "unquantized"),
        (["--codebook", "uniform"], "unknown codebook 'uniform'; known: nf, bof. Or name a JSON file"),
        (["--codebook", "no/such.json"], "No such file"),
        (["--absmax", "int8"], "unknown absmax"),
    ],
)
def test_bad_options(source, tmp_path, options, message):
    assert message in refuse(source, tmp_path / "out", *options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "must hold a list"),
        ("[-1, 0, NaN, 1]", "must hold a list"),
        ('"nf"', "must hold a list"),
        ('{"four": [1]}', "must hold a list"),
        ('{"2": [-1, -0.3, 0.3, 1], "02": [-1, -0.2, 0.2, 1]}', "must hold a list"),
        ("[-1, 0, 1]", "a 4-bit codebook has 16 levels"),
        ('{"3": [-1, -0.7, -0.4, -0.1, 0.1, 0.4, 0.7, 1]}', "4"),
    ],
)
def test_bad_codebooks(source, tmp_path, content, message):
    levels = tmp_path / "levels.json"
    levels.write_text(content)
    assert message in refuse(source, tmp_path / "out", "--codebook", str(levels))
    assert list(tmp_path.iterdir()) == [levels]


@pytest.mark.parametrize("count", ["num_hidden_layers", "num_experts"])
def test_more_layers_than_there_are_tensors(source, tmp_path, count, monkeypatch):
    """Whose model would be made until memory ends."""
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", lambda *_, **__: pytest.fail("made"))

    def change(config, _):
        config[count] = 10**9

    altered(source, tmp_path / "in", change)
    told = refuse(tmp_path / "in", tmp_path / "out")
    assert f"{tmp_path / 'in' / 'config.json'}: {count} is 1000000000, and the folder has only " in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_stays_unquantized_and_is_not_finite_is_named(source, tmp_path, value):
    def change(_, tensors):
        tensors["model.norm.weight"][3] = value

    altered(source, tmp_path / "in", change)
    result = run(tmp_path / "in", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "NaN or infinity in unquantized tensors: model.norm.weight" in " ".join(result.output.split())
    assert "infinity" not in run(source, tmp_path / "fine").output
