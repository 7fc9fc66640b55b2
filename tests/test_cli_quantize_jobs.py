"""`kbit quantize --jobs`: the same bytes from any number of workers, and one error where one fails."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from kbit.cli.quantize import _summary
from kbit.format.names import original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import read_header
from kbit.integrations import streaming
from kbit.integrations.streaming import Report
from kbit.integrations.streaming import folder as work_folder
from kbit.integrations.streaming.reader import read_tensor
from kbit.integrations.streaming.workers import run_all, worker_devices
from quantize_runs import content, run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "source"
    tiny_models.build("qwen3_moe", torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def without_syncing(small_shards, monkeypatch):
    # Dozens of shards a run: on a disk that is busy otherwise, syncing each takes most of a second.
    monkeypatch.setattr(work_folder.os, "fsync", lambda descriptor: None)


@pytest.mark.parametrize("count", [2, 3, 16])
def test_the_bytes_do_not_depend_on_the_number_of_jobs(count, source, tmp_path):
    assert run(source, tmp_path / "one").exit_code == 0
    result = run(source, tmp_path / "many", "--jobs", count)
    assert result.exit_code == 0, result.output
    assert len(content(tmp_path / "one")) > 4
    assert content(tmp_path / "one") == content(tmp_path / "many")


def test_the_summary_as_json(source, tmp_path):
    out = tmp_path / "summary.json"
    assert run(source, tmp_path / "out", "--jobs", 2, "--json", out).exit_code == 0
    summary = json.loads(out.read_text())
    assert summary["workers"] == ["cpu", "cpu"]
    assert summary["written_weights"] == summary["weights"] > 0
    assert summary["weights_per_second"] == pytest.approx(summary["weights"] / summary["seconds"])
    assert summary["seconds_for_80b"] == pytest.approx(80e9 / summary["weights_per_second"])
    assert summary["policy"]["bits"] == 4


def test_the_summary_names_the_gpu_that_quantized(monkeypatch):
    monkeypatch.setattr("kbit.bench.gpu_timing.describe", lambda device: {"gpu": device})
    about = _summary(Report(workers=["cuda:1", "cuda:0"]), Path("model"), QuantizationPolicy())
    assert about["machine"] == {"gpu": "cuda:1"}


def test_no_more_workers_than_shards(source, tmp_path):
    out = tmp_path / "out.json"
    assert run(source, tmp_path / "out", "--jobs", 1024, "--json", out).exit_code == 0
    summary = json.loads(out.read_text())
    assert len(summary["workers"]) == summary["shards"]


def test_progress_reaches_the_total_in_order(source, tmp_path):
    seen = []
    from kbit.format import QuantizationPolicy

    policy = QuantizationPolicy(bits=4)
    streaming.quantize_checkpoint(
        source, tmp_path / "out", policy, progress=lambda *args: seen.append(args), jobs=3
    )
    done = [entry[0] for entry in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1]


def test_one_failing_worker_stops_all_and_the_next_run_goes_on(source, tmp_path, monkeypatch):
    real, lock, calls = work_folder.save_file, threading.Lock(), []

    def save(tensors, path, metadata=None):
        with lock:
            calls.append(path)
            number = len(calls)
        if number == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(tensors, path, metadata=metadata)

    with monkeypatch.context() as patch:
        patch.setattr(work_folder, "save_file", save)
        result = run(source, tmp_path / "out", "--jobs", 2)
    assert result.exit_code == 1
    assert "No space left" in str(result.exception)
    kept = len(list((tmp_path / "out.partial").glob("*.safetensors")))
    assert 2 <= kept <= 3
    result = run(source, tmp_path / "out", "--jobs", 2)
    assert result.exit_code == 0, result.output
    assert f"{kept} of them from before" in result.output.replace("\n", " ")
    assert run(source, tmp_path / "whole").exit_code == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_nan_is_named_and_nothing_is_left(source, tmp_path):
    shutil.copytree(source, tmp_path / "in")
    file = tmp_path / "in" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    result = run(tmp_path / "in", tmp_path / "out", "--jobs", 4)
    assert result.exit_code == 1
    assert name in str(result.exception)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "cuda:99"], "torch sees"),
        (["--device", "tpu"], "no device 'tpu'. Use cpu, cuda, or a list such as cuda:0,cuda:1."),
        (["--device", "cpu,meta"], "no device 'meta'. Use cpu, cuda, or a list"),
        (["--device", "cpu,cpu", "--jobs", "1"], "leaves some of 2 devices idle"),
    ],
)
def test_bad_devices(options, message, source, tmp_path):
    result = run(source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_worker_devices():
    assert worker_devices(["cpu"], None) == [CPU]
    assert worker_devices(["cpu"], 3) == [CPU] * 3
    with pytest.raises(ValueError, match="no device to quantize on"):
        worker_devices([], None)


def test_spaces_between_devices_are_no_part_of_their_names(source, tmp_path):
    result = run(source, tmp_path / "out", "--device", "cpu, cpu")
    assert result.exit_code == 0, result.output


def test_workers_share_the_threads_and_leave_the_callers_alone():
    before, seen = torch.get_num_threads(), []
    run_all([lambda device, stopped: seen.append(torch.get_num_threads())] * 8, [CPU, CPU])
    assert seen == [max(1, before // 2)] * 8
    later = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert seen[-1] == torch.get_num_threads() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
def test_reader(dtype, tmp_path):
    tensors = {"a": torch.randn(3, 5, 7).mul(50).abs().to(dtype), "b": torch.ones(0, 4, dtype=dtype)}
    tensors["scalar"] = torch.tensor(3).to(dtype)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(name, header[name], CPU), tensor)
    assert torch.equal(read_tensor("a", header["a"], CPU, expert=2), tensors["a"][2])
    whole = (tmp_path / "x.safetensors").read_bytes()
    (tmp_path / "x.safetensors").write_bytes(b"no header" + whole[9:])
    assert torch.equal(read_tensor("a", header["a"], CPU), tensors["a"]), "parsed for every tensor again"
    (tmp_path / "x.safetensors").write_bytes(whole[:-8])
    with pytest.raises(ValueError, match="truncated"):
        [read_tensor(name, header[name], CPU) for name in tensors]


@pytest.mark.gpu
def test_gpus_give_the_bytes_of_the_cpu(source, tmp_path):
    assert run(source, tmp_path / "cpu").exit_code == 0
    result = run(source, tmp_path / "gpu", "--device", "cuda")
    assert result.exit_code == 0, result.output
    assert content(tmp_path / "cpu") == content(tmp_path / "gpu")
    devices = ",".join(f"cuda:{index}" for index in range(torch.cuda.device_count()))
    result = run(source, tmp_path / "all", "--device", devices, "--jobs", 3 * torch.cuda.device_count())
    assert result.exit_code == 0, result.output
    assert content(tmp_path / "cpu") == content(tmp_path / "all")


@pytest.mark.gpu
def test_codes_that_a_gpu_is_still_writing(source, tmp_path):
    policy = QuantizationPolicy(bits=4)
    streaming.quantize_checkpoint(source, tmp_path / "plain", policy)
    files = [load_file(file) for file in (tmp_path / "plain").glob("*.safetensors")]
    parts = {name: part for file in files for name, part in file.items() if original_of(name) != name}

    torch.cuda.Stream()  # the first one of a process waits for the device

    def make() -> dict[str, torch.Tensor]:
        there = {name: part.cuda() for name, part in parts.items()}
        for late in (False, True):  # at first, so that kernels are loaded
            made = {name: torch.zeros_like(part) for name, part in there.items()}
            if late:
                torch.cuda._sleep(10**9)  # half a second
            for name, part in made.items():
                part += there[name]
        return made

    codes = streaming.Codes("late", make)
    streaming.quantize_checkpoint(source, tmp_path / "late", policy, devices=["cuda"], codes=codes)
    assert content(tmp_path / "late") == content(tmp_path / "plain")
