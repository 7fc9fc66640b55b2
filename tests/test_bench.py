"""The timing protocol and the tables. No test here asserts a speed."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from kbit.backends import cpu
from kbit.bench import cpu as bench
from kbit.bench import cpu_timing, gpu_timing, machine, repeats
from kbit.bench.decode import tokens_per_second
from kbit.cli import bench as command


def test_median_and_spread_of_samples():
    assert repeats.median_and_spread([4.0, 1.0, 2.0, 9.0, 3.0]) == (3.0, pytest.approx(8 / 3))


def test_arms_are_interleaved_and_every_index_reaches_the_call():
    seen = []
    calls = {name: lambda index, name=name: seen.append((name, index)) for name in "ab"}
    results = cpu_timing.measure(calls, repeats=7)
    assert list(results) == ["a", "b"]
    assert seen == [("a", 0), ("b", 0)] + [(name, index) for index in range(1, 8) for name in "ab"]


def test_too_few_repeats_are_refused():
    with pytest.raises(ValueError, match="at least 7"):
        cpu_timing.measure({}, repeats=3)


def test_slow_calls_stop_at_the_least_number_of_repeats():
    count = []
    cpu_timing.measure({"slow": count.append}, repeats=50, max_seconds=0.0)
    assert len(count) == 1 + repeats.MIN_REPEATS


@pytest.mark.parametrize("nbytes", [1, 10**6, 31 * 10**6, 10**9])
def test_rotated_copies_exceed_the_cache_three_times(nbytes):
    cache = 32 * 2**20
    copies = cpu_timing.copies_needed(nbytes, cache)
    assert copies >= 2
    assert (copies - 1) * nbytes >= 3 * cache


def test_machine_says_what_a_result_was_measured_on(monkeypatch):
    import transformers

    about = machine.describe()
    assert {"date", "commit", "torch", "cpu", "threads", "isa"} <= set(about)
    assert about["torch"] == torch.__version__
    assert about["transformers"] == transformers.__version__
    monkeypatch.delitem(sys.modules, "transformers")
    assert machine.describe()["transformers"] is None
    json.dumps(about)


def test_a_copy_in_the_checkout_of_another_project_has_no_commit(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=x", "-c", "user.email=x@y.z"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True)

    file = tmp_path / "bench" / "machine.py"
    file.parent.mkdir()
    file.write_text("")
    monkeypatch.setattr(machine, "__file__", str(file))
    assert machine.describe()["commit"] is None
    git("init")
    git("commit", "--allow-empty", "-m", "another project's")
    assert machine.describe()["commit"] is None
    git("add", ".")
    git("commit", "-m", "its own")
    assert "+" not in machine.describe()["commit"]
    file.write_text("changed")
    assert machine.describe()["commit"].endswith("+changes")


def test_a_processor_without_a_family_is_named_without_it(monkeypatch):
    arm = "processor\t: 0\nBogoMIPS\t: 2100.00\nCPU implementer\t: 0x41\n"
    monkeypatch.setattr(machine.Path, "read_text", lambda *_: arm)
    monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
    assert machine.cpu_model() == "aarch64"


def test_a_result_names_the_gpu_that_it_was_measured_on(monkeypatch):
    def properties(index):
        values = {"name": f"GPU {index}", "major": 9, "minor": 0, "multi_processor_count": 1}
        return SimpleNamespace(**values, L2_cache_size=2**20)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert gpu_timing.describe()["gpu"] == "GPU 0"
    assert gpu_timing.describe("cuda:1")["gpu"] == "GPU 1"
    assert gpu_timing.describe("cpu") == machine.describe()


@pytest.mark.skipif(not cpu.available(), reason="no CPU kernels to measure")
def test_bench_cpu_prints_and_writes_every_row(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", {"tiny": (64, 32)})
    monkeypatch.setattr(bench, "LARGE", (64, 32))
    monkeypatch.setattr(cpu_timing, "copies_needed", lambda nbytes, cache: 2)
    monkeypatch.setattr(cpu_timing, "read_bandwidth", lambda: 10.0)
    file = tmp_path / "cpu.json"
    options = ["cpu", "-m", "1,3", "--bits", "4", "--repeats", "7", "--json", str(file)]
    result = CliRunner().invoke(command.app, [*options, "--threads", str(torch.get_num_threads())])
    assert result.exit_code == 0, result.output
    assert "64 -> 32" in result.output
    written = json.loads(file.read_text())
    kernels = {(row["kernel"], row["bits"]) for row in written["linear"]}
    isas = {(isa, 4) for isa in cpu.supported_isas()}
    assert kernels == {("torch float32", None), ("torch bfloat16", None)} | isas
    assert {row["rows"] for row in written["linear"]} == {1, 3}
    assert len(written["quantize"]) == 8 * len(isas)


def test_decode_speed_counts_the_tokens_it_made():
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    speed = tokens_per_second(model, torch.arange(5)[None], new_tokens=3, repeats=1)
    assert (speed.prompt_tokens, speed.new_tokens) == (5, 3)
    assert speed.decode_tokens_s > 0
    short = tokens_per_second(model, torch.arange(5)[None], new_tokens=9, repeats=2, seconds=0)
    assert short.new_tokens == 1, "a slow backend is not waited for"
    assert short.decode_tokens_s > 0
