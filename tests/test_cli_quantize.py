"""`kbit quantize`: equal to quantizing on load, whatever happens on the way."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kbit
import tiny_models
from kbit.backends import cpu
from kbit.format.checkpoint import parts_to_save, validate_checkpoint
from kbit.format.model_files import JOURNAL_NAME, read_index
from kbit.format.safetensors_header import read_header
from kbit.integrations import streaming
from kbit.integrations.streaming import jobs
from quantize_runs import SMALL_SHARD, altered, content, fail_at, refuse, run


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A tiny mixture of experts, with the side files of a real model folder."""
    folder = tmp_path_factory.mktemp("model") / "source"
    tiny_models.build("qwen3_moe", torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (folder / "tf_model.h5").write_bytes(b"\x89HDF")
    return folder


@pytest.mark.parametrize("architecture", sorted(tiny_models.ARCHITECTURES))
@pytest.mark.parametrize("embedding_bits", [None, 5])
def test_equals_quantizing_on_load(tmp_path, architecture, embedding_bits):
    from transformers import AutoModelForCausalLM

    tiny_models.build(architecture, torch.bfloat16).save_pretrained(tmp_path / "in")
    options = ["--override", r"down_proj=3", "--override", "layers.1.mlp=5"]
    policy = kbit.KbitConfig(
        bits=4, overrides={"down_proj": 3, "layers.1.mlp": 5}, embedding_bits=embedding_bits
    )
    if embedding_bits:
        options += ["--embedding-bits", str(embedding_bits)]
    result = run(tmp_path / "in", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    on_load = AutoModelForCausalLM.from_pretrained(tmp_path / "in", quantization_config=policy)
    on_load.save_pretrained(tmp_path / "expected")
    ours, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "expected"))
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    for name, tensor in on_load.state_dict().items():
        assert torch.equal(reloaded[name], tensor), name


def test_what_is_quantized_and_what_is_not(source, tmp_path):
    assert run(source, tmp_path / "out", "--skip", "model.layers.1.self_attn").exit_code == 0
    names = set(read_index(tmp_path / "out"))
    for quantized in ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.experts.3.gate_proj.weight"):
        assert {f"model.{quantized}_packed", f"model.{quantized}_absmax"} <= names
    kept = ("layers.0.mlp.gate.weight", "layers.0.input_layernorm.weight", "norm.weight")
    kept += ("embed_tokens.weight", "layers.1.self_attn.k_proj.weight")
    assert {f"model.{name}" for name in kept} <= names


def test_a_matrix_of_no_linear_layer_is_copied(tmp_path):
    """Its name and shape alone would have it quantized; the model says that it is not its own."""
    tiny_models.build("llama", torch.bfloat16).save_pretrained(tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file) | {"model.extra.weight": torch.randn(64, 64)}
    save_file(tensors, file, metadata={"format": "pt"})
    assert run(tmp_path / "in", tmp_path / "out").exit_code == 0
    assert torch.equal(
        load_file(tmp_path / "out" / "model.safetensors")["model.extra.weight"], tensors["model.extra.weight"]
    )


def test_folders_that_sentence_transformers_reads_come_along(source, tmp_path):
    model = shutil.copytree(source, tmp_path / "in")
    for name in ("1_Pooling/config.json", "2_Dense/model.safetensors", "original/consolidated.00.pth"):
        (model / name).parent.mkdir()
        (model / name).write_bytes(name.encode())
    listed = [{"path": path} for path in ("", "1_Pooling", "2_Dense", "../in/original", "missing", 7)]
    (model / "modules.json").write_text(json.dumps([*listed, None]))
    result = run(model, tmp_path / "out")
    assert result.exit_code == 0, result.output
    folders = {path.name for path in (tmp_path / "out").iterdir() if path.is_dir()}
    assert folders == {"additional_chat_templates", "1_Pooling", "2_Dense"}
    assert (tmp_path / "out" / "2_Dense" / "model.safetensors").read_bytes() == b"2_Dense/model.safetensors"


@pytest.mark.parametrize("text", ["", "{}", "[1", "null", pytest.param("[" * 100_000, id="deep")])
def test_a_list_of_modules_that_is_none(source, tmp_path, text):
    model = shutil.copytree(source, tmp_path / "in")
    (model / "modules.json").write_text(text)
    assert run(model, tmp_path / "out").exit_code == 0
    assert (tmp_path / "out" / "modules.json").read_text() == text


def test_an_adapter_in_the_folder_comes_along_whole(source, tmp_path):
    model = shutil.copytree(source, tmp_path / "in")
    (model / "adapter_config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, model / "adapter_model.safetensors")
    assert run(model, tmp_path / "out").exit_code == 0
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()


def test_no_policy_is_refused(source, tmp_path):
    with pytest.raises(TypeError, match="policy must be a KbitConfig or QuantizationPolicy, got int"):
        streaming.quantize_checkpoint(source, tmp_path / "out", 4)
    assert not [*tmp_path.iterdir()]


def test_side_files_and_config(source, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.quantize"], "_LARGE_BYTES", 1)
    result = run(source, tmp_path / "out", "--bits", 3)
    assert result.exit_code == 0, result.output
    assert re.search(r"peak memory \d+ MB$", result.output, re.M)  # a line of a file is not broken
    assert re.search(
        r"^\d+\.\d MB stay unquantized: kbit inspect .*out names what is large", result.output, re.M
    )
    out = tmp_path / "out"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert (out / "additional_chat_templates" / "tools.jinja").is_file()
    assert not [*out.glob("*.bin"), *out.glob("*.h5")]
    assert not (out / JOURNAL_NAME).exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    config = json.loads((out / "config.json").read_text())
    assert config.pop("quantization_config") == kbit.QuantizationPolicy(bits=3).to_dict()
    assert config == json.loads((source / "config.json").read_text())


def test_into_an_empty_folder_and_by_names_of_folders(source, tmp_path):
    (tmp_path / "out").mkdir()
    report = streaming.quantize_checkpoint(str(source), str(tmp_path / "out"), kbit.QuantizationPolicy())
    assert len(report.shards) == 1
    validate_checkpoint(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_an_interrupted_run_says_how_to_go_on(source, tmp_path, small_shards, monkeypatch):
    with monkeypatch.context() as patch:
        fail_at(patch, 3, KeyboardInterrupt())
        result = run(source, tmp_path / "out")
    assert "out.partial keeps 2 finished shards: the same command goes on" in result.output.replace("\n", "")
    result = run(source, tmp_path / "out")
    assert result.exit_code == 0, result.output


def test_many_shards_hold_what_one_does(source, tmp_path, small_shards, monkeypatch):
    assert run(source, tmp_path / "many").exit_code == 0
    monkeypatch.undo()
    assert run(source, tmp_path / "one").exit_code == 0
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 3
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {path.name for path in shards}
    merged = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert merged.keys() == one.keys() == index["weight_map"].keys()
    assert all(torch.equal(merged[name], one[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in one.values())
    validate_checkpoint(tmp_path / "many")


def test_fused_experts_on_disk_are_read_one_by_one(tmp_path, monkeypatch):
    """Equal to quantizing the whole stack, and no more than one expert goes through at a time."""
    shapes = []
    quantize = kbit.quantize

    def watch(w, *arguments, **keywords):
        shapes.append(tuple(w.shape))
        return quantize(w, *arguments, **keywords)

    w = torch.randn(3, 16, 40).bfloat16()
    save_file({"experts.down_proj": w}, tmp_path / "x.safetensors")
    monkeypatch.setattr(streaming.ops, "quantize", watch)
    header = read_header(tmp_path / "x.safetensors")["experts.down_proj"]
    policy = kbit.QuantizationPolicy()
    parts = jobs._parts("experts.down_proj", header, 4, policy)
    parts = streaming._run(jobs.Job("experts.down_proj", header, 4, parts, "experts.down_proj"), policy, {})
    expected = parts_to_save("experts.down_proj", quantize(w, 4))
    assert shapes == [(16, 40)] * 3
    assert parts.keys() == expected.keys()
    assert all(torch.equal(parts[name], expected[name]) for name in parts)


# -- interruptions -------------------------------------------------------------------------------------------

SCRIPT = f"""
import sys, os, signal, time
from pathlib import Path
from kbit.integrations.streaming import folder, jobs
jobs.SHARD_BYTES = {SMALL_SHARD}
"""


def start(script: str, *arguments: object) -> subprocess.Popen:
    code = SCRIPT + textwrap.dedent(script) + "\nfrom kbit.cli import main\nmain()\n"
    command = [sys.executable, "-c", code, "quantize", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_killed_and_resumed(source, tmp_path, small_shards):
    """kill -9 in the middle of writing the third shard; the next run gives the same bytes as one run does."""
    killer = """
    real, calls = folder.save_file, []
    def save_file(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 3:
            Path(path).write_bytes(b"half a shard")
            os.kill(os.getpid(), signal.SIGKILL)
        real(tensors, path, metadata)
    folder.save_file = save_file
    """
    process = start(killer, source, tmp_path / "out")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == -signal.SIGKILL, errors
    partial = tmp_path / "out.partial"
    assert not (tmp_path / "out").exists()
    assert len(list(partial.glob("*.safetensors"))) == 2
    before = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.safetensors")}

    result = run(source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "2 of them from before" in result.output.replace("\n", " ")
    for name, written in before.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == written
    assert run(source, tmp_path / "whole").exit_code == 0
    resumed, whole = tmp_path / "out", tmp_path / "whole"
    shutil.rmtree(resumed / "additional_chat_templates")
    shutil.rmtree(whole / "additional_chat_templates")
    assert content(resumed) == content(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_copy_that_was_cut_off_is_not_kept(source, tmp_path, monkeypatch):
    """Of a file that may be gone from the model by the next run, for it did not fit on the disk."""
    shutil.copytree(source, tmp_path / "in")
    (tmp_path / "in" / "video.mp4").write_bytes(bytes(1000))
    (tmp_path / "in" / "additional_chat_templates" / "other.jinja").write_text("other")
    copyfile = shutil.copyfile

    def cut_off(path, copy):
        copyfile(path, copy)
        if Path(path).name == "video.mp4":
            Path(copy).write_bytes(bytes(400))
            raise OSError(errno.ENOSPC, "No space left on device", str(copy))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", cut_off)
        refuse(tmp_path / "in", tmp_path / "out")
    assert (tmp_path / "out.partial" / "video.mp4").stat().st_size == 400
    (tmp_path / "in" / "video.mp4").unlink()
    shutil.rmtree(tmp_path / "in" / "additional_chat_templates")
    result = run(tmp_path / "in", tmp_path / "out")
    assert "1 of them from before" in result.output.replace("\n", " ")
    assert not (tmp_path / "out" / "video.mp4").exists()
    assert not (tmp_path / "out" / "additional_chat_templates").exists()


def test_other_options_start_over(source, tmp_path, small_shards, monkeypatch):
    with monkeypatch.context() as patch:
        fail_at(patch, 3, OSError(errno.EIO, "Input/output error"))
        refuse(source, tmp_path / "out", "--bits", 4)
    message = refuse(source, tmp_path / "out", "--bits", 2)
    assert "out.partial keeps 2 finished shards of an interrupted run with other settings" in message
    assert len(list((tmp_path / "out.partial").glob("*.safetensors"))) == 2
    result = run(source, tmp_path / "out", "--bits", 2, "--force")
    assert result.exit_code == 0, result.output
    assert "from before" not in result.output
    assert validate_checkpoint(tmp_path / "out").bits == 2


def test_a_changed_source_starts_over(source, tmp_path, small_shards, monkeypatch):
    shutil.copytree(source, tmp_path / "in")
    with monkeypatch.context() as patch:
        fail_at(patch, 3, OSError(errno.EIO, "Input/output error"))
        refuse(tmp_path / "in", tmp_path / "out")
    os.utime(tmp_path / "in" / "model.safetensors", ns=(1, 1))
    assert "pass --force to begin anew" in refuse(tmp_path / "in", tmp_path / "out")
    result = run(tmp_path / "in", tmp_path / "out", "--force")
    assert result.exit_code == 0, result.output
    assert "from before" not in result.output


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(bytes(100)),
        lambda path: save_file(load_file(path) | {"other": torch.ones(1)}, path),
        lambda path: save_file({name: tensor[:1] for name, tensor in load_file(path).items()}, path),
    ],
    ids=["truncated", "zeros", "another tensor", "other shapes"],
)
def test_a_damaged_shard_is_written_again(source, tmp_path, small_shards, monkeypatch, damage):
    with monkeypatch.context() as patch:
        fail_at(patch, 4, OSError(errno.EIO, "Input/output error"))
        refuse(source, tmp_path / "out")
    damage(sorted((tmp_path / "out.partial").glob("*.safetensors"))[1])
    result = run(source, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "2 of them from before" in result.output.replace("\n", " ")
    assert run(source, tmp_path / "whole").exit_code == 0
    for shard in (tmp_path / "whole").glob("*.safetensors"):
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()


def test_a_corrected_config_starts_over(tmp_path, small_shards, monkeypatch):
    """It says which tensors are weights of the model, and so which of them are quantized."""
    tiny_models.build("llama", torch.bfloat16).save_pretrained(tmp_path / "right")
    altered(tmp_path / "right", tmp_path / "in", lambda c, t: c.update(num_hidden_layers=1))
    with monkeypatch.context() as patch:
        fail_at(patch, 3, OSError(errno.EIO, "Input/output error"))
        refuse(tmp_path / "in", tmp_path / "out")
    shutil.copy(tmp_path / "right" / "config.json", tmp_path / "in")
    result = run(tmp_path / "in", tmp_path / "out", "--force")
    assert result.exit_code == 0, result.output
    assert "from before" not in result.output
    assert run(tmp_path / "right", tmp_path / "whole").exit_code == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_two_processes_at_once(source, tmp_path):
    """The second one is refused while the first writes, and the first finishes unharmed."""
    waiter = f"""
    real = folder.save_file
    def save_file(tensors, path, metadata):
        Path({str(tmp_path / "writing")!r}).touch()
        while not Path({str(tmp_path / "go")!r}).exists():
            time.sleep(0.02)
        real(tensors, path, metadata)
    folder.save_file = save_file
    """
    first = start(waiter, source, tmp_path / "out")
    try:
        while not (tmp_path / "writing").exists():
            assert first.poll() is None, first.communicate()
            time.sleep(0.05)
        second = start("", source, tmp_path / "out")
        _, errors = second.communicate(timeout=120)
        assert second.returncode == 1
        assert "another process" in errors
        assert "Traceback" not in errors
        (tmp_path / "go").touch()
        _, errors = first.communicate(timeout=120)
    finally:
        first.kill()
    assert first.returncode == 0, errors
    validate_checkpoint(tmp_path / "out")
    assert not list(tmp_path.glob("*.lock"))


def test_one_shard_is_singular(source, tmp_path):
    assert "in 1 shard\n" in run(source, tmp_path / "out").output


@pytest.mark.parametrize(
    ("speed", "words"),
    [
        (2.124e8, "212 M weights/s"),
        (9.876e6, "9.9 M weights/s"),
        (4.4e5, "440 k weights/s"),
        (0.0, "0 k weights/s"),
    ],
)
def test_the_summary_has_a_unit_that_fits_the_speed(source, tmp_path, monkeypatch, speed, words):
    monkeypatch.setattr(streaming.Report, "weights_per_second", speed)
    assert words in run(source, tmp_path / "out").output.replace("\n", " ")


def test_the_summary_fits_a_terminal(source, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming.Report, "weights_per_second", 2.124e8)
    monkeypatch.setattr(streaming.Report, "bits_per_weight", 4.25)
    lines = run(source, tmp_path / "o").output.splitlines()[1:3]
    assert re.fullmatch(r"[\d.]+% of [\d.]+ M weights at 4.25 bits", lines[0])
    assert re.fullmatch(r"[\d.]+ s, 212 M weights/s, peak memory \d+ MB", lines[1])


@pytest.mark.parametrize("name", ["float16", "fp16", "float32", "fp32"])
def test_formats_of_scales_are_called_as_dtypes_are(source, tmp_path, name):
    run(source, tmp_path / "out", "--absmax", name)
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert section["absmax_format"] == f"float{name[-2:]}"


# -- memory --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not cpu.available(), reason="minutes on the reference backend")
def test_peak_memory_does_not_grow_with_the_model(tmp_path):
    """1.2 GB of weights, the largest tensor 8.4 M: at most twice that in float32, plus 1 GB."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_hidden_layers": 14,
        "num_attention_heads": 16,
        "vocab_size": 256,
        "dtype": "bfloat16",
    }
    write_large_model(tmp_path / "in", config)
    size = sum(path.stat().st_size for path in (tmp_path / "in").glob("*.safetensors"))
    process = start("", tmp_path / "in", tmp_path / "out", "--plain")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    peak = 1e6 * int(re.search(r"peak\s+memory\s+(\d+)\s+MB", output)[1])
    assert size > 1.15e9
    assert 1e8 < peak < 2 * 4 * 4096 * 2048 + 1e9


def write_large_model(folder: Path, config: dict) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    h, i = config["hidden_size"], config["intermediate_size"]
    shapes = {f"self_attn.{name}_proj": (h, h) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)}
    random = {shape: torch.randn(shape).bfloat16() for shape in set(shapes.values())}
    weight_map = {}
    for layer in range(config["num_hidden_layers"]):
        prefix, file = f"model.layers.{layer}.", f"layer{layer}.safetensors"
        tensors = {prefix + name + ".weight": random[shape].clone() for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[prefix + norm + ".weight"] = torch.ones(h, dtype=torch.bfloat16)
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    ends = {"model.embed_tokens.weight": torch.randn(256, h), "lm_head.weight": torch.randn(256, h)}
    save_file(ends | {"model.norm.weight": torch.ones(h)}, folder / "ends.safetensors")
    weight_map |= dict.fromkeys([*ends, "model.norm.weight"], "ends.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("by_width", [False, True])
def test_levels_from_a_file(source, tmp_path, by_width):
    levels = [round(i / 15 - (15 - i) / 15, 6) for i in range(16)]
    three = [-1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0]
    (tmp_path / "levels.json").write_text(json.dumps({"3": three, "4": levels} if by_width else levels))
    options = ["--override", "down_proj=3"] if by_width else []
    result = run(source, tmp_path / "out", "--codebook", str(tmp_path / "levels.json"), *options)
    assert result.exit_code == 0, result.output
    policy = validate_checkpoint(tmp_path / "out")
    assert policy.codebook_for(4).tolist() == pytest.approx(levels)
    if by_width:
        assert policy.codebook_for(3).tolist() == pytest.approx(three)


@pytest.mark.skipif(sys.platform == "win32", reason="links")
def test_links_that_lead_out_of_the_folder_are_told(source, tmp_path):
    model = shutil.copytree(source, tmp_path / "in")
    (tmp_path / "private.txt").write_text("secret")
    (model / "inside.txt").symlink_to("config.json")
    assert "elsewhere" not in run(model, tmp_path / "first").output
    (model / "notes.txt").symlink_to(tmp_path / "private.txt")
    result = run(model, tmp_path / "second")
    assert result.exit_code == 0, result.output
    assert "links to files that are elsewhere, whose content is copied: notes.txt." in result.output
    cached = shutil.copytree(source, tmp_path / "hub" / "models--a--b" / "snapshots" / "123")
    (tmp_path / "hub" / "models--a--b" / "blobs").mkdir()
    (tmp_path / "hub" / "models--a--b" / "blobs" / "1").write_text("{}")
    (cached / "tokenizer.json").unlink()
    (cached / "tokenizer.json").symlink_to("../../blobs/1")
    assert "elsewhere" not in run(cached, tmp_path / "third").output
