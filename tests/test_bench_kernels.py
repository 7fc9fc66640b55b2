"""`kbit bench kernels`: shapes, timing protocol, arms, ncu and the commands, up to real runs on a GPU."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch

import kbit
from bench_runs import refuse, run
from kbit.bench import (
    conversions,
    dequant,
    gpu_timing,
    kernel_rows,
    kernels,
    ncu,
    peers,
    repeats,
    shapes,
    targets,
)
from kbit.bench.kernel_rows import BASELINE, OURS, PEER
from kbit.format import SUPPORTED_BITS
from kbit.format.words import first_line
from made_up_rows import BANDWIDTH, made_up, problem

MB = 2**20


# -- shapes --------------------------------------------------------------------------------------------------


def test_names_are_unique_and_every_target_has_a_shape():
    names = [shape.name for shape in shapes.SHAPES]
    assert len(names) == len(set(names))
    assert set(targets._data()["speedups"]) <= {shape.name for shape in shapes.DENSE}


def test_shapes_are_chosen_by_name_and_model():
    assert shapes.select() == shapes.DENSE
    assert [shape.name for shape in shapes.select(models=["glm-4.7-flash"])] == ["glm_gu"]
    (large,) = shapes.select(["l70b"])
    assert (large.in_features, large.out_features, large.weights) == (8192, 28672, 8192 * 28672)


@pytest.mark.parametrize(
    ("names", "models", "message"),
    [
        (["gatup"], [], "unknown shape gatup; known: gateup, down"),
        ([], ["gpt"], "unknown model gpt; known: qwen3-coder-next"),
        (["moe_gu", "q"], [], "moe_gu belong to experts"),
        (["l8b"], ["llama-3-70b"], "no shape of l8b belongs to llama-3-70b"),
    ],
)
def test_unknown_and_grouped_shapes_are_refused(names, models, message):
    with pytest.raises(ValueError, match=message):
        shapes.select(names, models)


# -- timing protocol -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", shapes.DENSE, ids=lambda shape: shape.name)
@pytest.mark.parametrize("bits", [*SUPPORTED_BITS, 16])
def test_copies_exceed_the_cache_within_bounds(shape, bits):
    nbytes, cache = shape.weights * bits // 8, 60 * MB
    copies = gpu_timing.copies_needed(nbytes, cache)
    assert copies >= gpu_timing.MIN_COPIES
    assert copies * nbytes >= gpu_timing.CACHE_FACTOR * cache
    assert copies * nbytes <= gpu_timing.MAX_COPY_BYTES


@pytest.mark.parametrize(
    ("nbytes", "cap", "copies"),
    [(100, 10**9, 5), (99, 10**9, 6), (500, 10**9, 4), (500, 1500, 3), (500, 10, 2), (0, 10**9, 500)],
)
def test_number_of_copies(nbytes, cap, copies):
    assert gpu_timing.copies_needed(nbytes, 100, cap) == copies


def test_median_and_spread_of_microseconds():
    result = gpu_timing.summarize([4.0, 1.0, 2.0, 9.0, 3.0])
    assert (result.us, result.spread) == (3.0, pytest.approx(8 / 3))
    with pytest.raises(ValueError, match="at least 7"):
        repeats.check_repeats(6)


def test_variables_are_set_for_a_while(monkeypatch):
    monkeypatch.setenv("KBIT_A", "before")
    monkeypatch.delenv("KBIT_B", raising=False)
    with gpu_timing.environment({"KBIT_A": "1", "KBIT_B": "2"}):
        assert (gpu_timing.os.environ["KBIT_A"], gpu_timing.os.environ["KBIT_B"]) == ("1", "2")
    assert gpu_timing.os.environ["KBIT_A"] == "before"
    assert "KBIT_B" not in gpu_timing.os.environ


# -- arms ----------------------------------------------------------------------------------------------------


def packed_weights(plan: kernels.Plan) -> kernels.Weights:
    w = torch.randn(48, 64, dtype=kernels.DTYPES[plan.dtype])
    packed = {bits: [kernels.ops.quantize(w, bits=bits) for _ in range(2)] for bits in plan.bits}
    peer = peers.PeerWeight(lambda x: x @ w.T, 7)
    return kernels.Weights([w, w.clone()], packed, {("humming", 4): [peer]})


def test_every_arm_computes_the_layer():
    plan = kernels.Plan(bits=(3, 4), variants=[{"KBIT_BACKEND": "reference"}])
    weights = packed_weights(plan)
    x = torch.randn(5, 64).half()
    arms = kernels.make_arms(weights, x, plan)
    found = {(kernel, bits, kind) for kernel, bits, kind, _ in arms}
    ours = {(name, bits, OURS) for name in ("kbit", "kbit BACKEND=reference", "dq+cublas") for bits in (3, 4)}
    assert found == {("cublas", None, BASELINE), ("humming", 4, PEER)} | ours
    expected = x.float() @ weights.dense[0].float().T
    for (kernel, bits, _, nbytes), arm in arms.items():
        assert len(arm.calls) == (1 if kernel == "humming" else 2)
        for call in arm.calls:
            error = (call().float() - expected).norm() / expected.norm()
            assert error < {None: 0.01, 3: 0.3, 4: 0.15}[bits]
        if kernel == "kbit":
            assert nbytes == weights.packed[bits][0].nbytes
    assert arms["kbit BACKEND=reference", 4, OURS, weights.packed[4][0].nbytes].environment


def test_a_peer_that_refuses_a_number_of_tokens_leaves_that_row_only():
    plan = kernels.Plan(bits=(4,))
    weights = packed_weights(plan)

    def call(x):
        if x.shape[0] > 1:
            raise RuntimeError("one token\nonly")
        return x @ weights.dense[0].T

    weights.peers["humming", 4] = [peers.PeerWeight(call, 7)]
    for count, expected in ((1, True), (2, False), (2, False)):
        arms = kernels.make_arms(weights, torch.randn(count, 64).half(), plan)
        assert (("humming", 4, PEER, 7) in arms) == expected
    assert weights.absent == {"humming": ["refuses M=2, K=64: one token"]}


@pytest.fixture
def on_cpu(monkeypatch):
    """The measurements' set-up on the CPU; the timer calls each arm once and makes its times up."""
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_timing, "l2_bytes", lambda: 4096)
    monkeypatch.setattr(gpu_timing, "rest", lambda: None)
    monkeypatch.setitem(sys.modules, "humming.layer", None)

    def timer(arms, repeats):
        for arm in arms.values():
            arm.calls[-1]()
        return {key: gpu_timing.GpuTiming(1.0 + index, 0.1) for index, key in enumerate(arms)}

    layer = shapes.LayerShape("tiny", "model", 64, 32, 1, "")
    return layer, kernels.Plan(rows=(1, 3), bits=(2, 4), dtype="bf16", timer=timer)


def test_rows_of_a_shape(on_cpu):
    layer, plan = on_cpu
    absent: dict[str, list[str]] = {}
    rows = list(kernels.shape_rows(layer, plan, absent))
    kinds = [(row.kernel, row.bits) for row in rows if row.rows == 1 and row.kind != PEER]
    ours = list(itertools.product((2, 4), ("kbit", "dq+cublas")))
    assert kinds == [("cublas", None), *((kernel, bits) for bits, kernel in ours)]
    assert "humming" in absent
    assert {row.rows for row in rows} == {1, 3}
    for row in rows:
        assert row.copies * row.weight_bytes >= gpu_timing.CACHE_FACTOR * 4096
        assert row.weight_bytes == 32 * 64 * (16 if row.bits is None else row.bits + 0.25) / 8


def test_copies_share_nothing_that_is_read(on_cpu):
    layer, plan = on_cpu
    weights = kernels.make_weights(layer, plan)
    for copies in weights.packed.values():
        assert len({q.packed.data_ptr() for q in copies}) == len(copies)
        assert len({q.absmax.data_ptr() for q in copies}) == len(copies)
    assert len({w.data_ptr() for w in weights.dense}) == len(weights.dense)


def test_dequantize_rows_of_a_shape(on_cpu):
    layer, plan = on_cpu
    rows = list(dequant.shape_rows(layer, replace(plan, with_peers=False)))
    assert [(row.rows, row.bits) for row in rows] == [(1, 2), (1, 4), (3, 2), (3, 4)]
    assert (rows[0].fp16_us, rows[0].dequantize_us, rows[0].total_us) == (1.0, 2.0, 3.0)
    assert rows[0].gb_s == pytest.approx(32 * 64 * (16 + 2.25) / 8 / 2e3)


def test_kernels_over_rows_alone(on_cpu, monkeypatch):
    """Bytes, names and order; the kernels themselves are made up."""
    layer, plan = on_cpu

    def quantized(w, codebook, between, bits, window):
        q = kbit.quantize(w, bits, codebook, search=window is not None)
        return q.packed, q.absmax, q.scale

    def nothing(*args):
        return torch.zeros(1)

    monkeypatch.setattr(conversions.rows, "quantize", quantized)
    for name in ("quantize_unchecked", "to_tiled", "from_tiled", "dequantize", "dequantize_tiled"):
        monkeypatch.setattr(conversions.rows, name, nothing)
    monkeypatch.setattr(gpu_timing, "warm_up", lambda arm: None)
    rows = list(conversions.shape_rows(layer, plan, "cpu"))
    names = ["quantize", conversions.WAITING, "tile", "untile", "dequantize", "dequantize tiles"]
    assert [row.kernel for row in rows] == 2 * names
    few = 32 * 64 * 2.25 / 8
    moved = {row.kernel: row.gb_s * 1e3 * row.us for row in rows if row.bits == 2}
    assert moved == pytest.approx(
        dict.fromkeys(names, few + 2 * 32 * 64) | {"tile": 2 * few, "untile": 2 * few}
    )
    (table,) = conversions.tables(rows, 1000.0)
    assert table.row_count == 12
    (first, *_) = conversions.as_json(rows, 1000.0)
    assert first["share_of_read_bandwidth"] == pytest.approx(first["gb_s"] / 1000.0, abs=1e-3)


def test_arms_are_replayed_in_turns_and_short_graphs_repeated(monkeypatch):
    seen: list[str] = []

    class Graph:
        def __init__(self, name: str, ms: float) -> None:
            self.name, self.ms = name, ms

        def replay(self) -> None:
            seen.append(f"warm {self.name}")

    def replay_ms(graph):
        seen.append(graph.name)
        return graph.ms

    monkeypatch.setattr(gpu_timing, "warm_up", lambda arm: None)
    monkeypatch.setattr(gpu_timing, "_capture", lambda arm, rounds: Graph(arm.calls[0](), 0.2 * rounds))
    monkeypatch.setattr(gpu_timing, "_replay_ms", replay_ms)
    arms = {name: gpu_timing.Arm([lambda name=name: name] * 4) for name in "abc"}
    results = gpu_timing.measure(arms, 7)
    # Four calls take 0.2 ms: three rounds of them fill the least length of a graph.
    assert seen[:6] == ["warm a", "a", "warm a", "warm b", "b", "warm b"]
    turns = ["".join(seen[i : i + 3]) for i in range(9, len(seen), 3)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 7
    assert len({turn[turn.index("a") - 1] for turn in turns if turn[0] != "a"}) == 2  # who ran before varies
    assert results["a"].us == pytest.approx(200 / 4)
    assert list(results) == ["a", "b", "c"]


def test_a_wrong_kernel_is_not_measured(monkeypatch):
    plan = kernels.Plan(bits=(4,))
    weights, x = packed_weights(plan), torch.randn(40, 64).half()
    (shape,) = shapes.select(["kv"])
    kernels._check_results(shape, x, weights, plan)
    right = kernels.ops.linear
    for wrong in (lambda x, q: right(x, q) * 1.1, lambda x, q: right(x, q) * float("nan")):
        monkeypatch.setattr(kernels.ops, "linear", wrong)
        with pytest.raises(ValueError, match=r"kbit is wrong on kv \(2048x512\) at M=40, k=4, fp16"):
            kernels._check_results(shape, x, weights, plan)


def test_peers_say_why_they_are_absent(monkeypatch):
    humming, int4 = peers.PEERS
    w = torch.randn(32, 64).half()
    monkeypatch.setitem(sys.modules, "humming.layer", None)
    assert "pip install humming-kernels" in peers.build(humming, w, 4, lambda nbytes: 2)
    assert peers.build(int4, w, 4, lambda nbytes: 2) == "takes bfloat16 only, not float16"
    assert peers.build(int4, w.bfloat16(), 3, lambda nbytes: 2) == "has 4 bits only"
    broken = replace(int4, reason=lambda bits, dtype: None, make=lambda w, bits: 1 / 0)
    assert peers.build(broken, w, 4, lambda nbytes: 2) == "refuses 64x32, k=4: division by zero"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("\nno kernel\nfor this"), "no kernel"),
        (KeyError(3), "3"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error(error, told):
    assert first_line(error) == told


# -- ncu -----------------------------------------------------------------------------------------------------


NCU_LOG = """==PROF== Connected to process 12
==PROF== Profiling "spin_kernel": 0%
"ID","Process ID","Kernel Name","Device","Metric Name","Metric Unit","Metric Value"
"0","12","at::cuda::<unnamed>::spin_kernel(long)","0","gpu__time_duration.sum","ns","1,312"
"1","12","stream(Params)","0","gpu__time_duration.sum","ns","31,500"
"2","12","at::cuda::<unnamed>::spin_kernel(long)","0","gpu__time_duration.sum","ns","1,344"
"3","12","void dequantize(int)","0","gpu__time_duration.sum","ns","20,000"
"4","12","nvjet ""hsh"", 128x8","0","gpu__time_duration.sum","us","2.5"
""".splitlines()


def test_calls_are_told_apart_by_their_markers():
    assert ncu.parse(NCU_LOG) == pytest.approx([31.5, 22.5])
    assert ncu.parse(["==ERROR== no permission"]) == []


def test_recorded_rows_get_the_times_of_their_calls():
    rows = [made_up("q", 1, "kbit", 0.0), made_up("q", 1, "cublas", 0.0, None, BASELINE)]
    filled = ncu.fill(rows, [2.0, 1.0, 3.0, 8.0, 8.0, 8.0], repeats=3)
    assert [(row.us, row.spread) for row in filled] == [(2.0, 1.0), (8.0, 0.0)]
    with pytest.raises(ValueError, match="2 rows of 7 calls were run, ncu saw 6 calls"):
        ncu.fill(rows, [1.0] * 6, repeats=7)


def fake_ncu(folder, code: int):
    """A program that behaves as ncu does: runs its arguments, or says what is wrong."""
    rows = json.dumps({"rows": kernel_rows.as_json([made_up("q", 1, "kbit", 0.0)]), "peers_absent": {}})
    log = "\n".join([NCU_LOG[2], *NCU_LOG[3:5] * 7])
    program = folder / "ncu"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom pathlib import Path\na = sys.argv\n"
        f"if {code}: print('==ERROR== ERR_NVGPUCTRPERM'); sys.exit({code})\n"
        f"assert a[a.index('--clock-control') + 1] == 'none' and '--csv' in a\n"
        f"Path(a[a.index('--log-file') + 1]).write_text({log!r})\n"
        f"Path(a[a.index('--json') + 1]).write_text({rows!r})\n"
    )
    program.chmod(0o755)
    return program


def test_running_under_ncu(tmp_path, monkeypatch):
    monkeypatch.setattr(ncu, "find", lambda: str(fake_ncu(tmp_path, 0)))
    recorded, rows = ncu.run(["bench", "kernels"], repeats=7)
    assert recorded["peers_absent"] == {}
    assert [row.us for row in rows] == [31.5]
    monkeypatch.setattr(ncu, "find", lambda: str(fake_ncu(tmp_path, 3)))
    with pytest.raises(ValueError, match="ended with code 3: .*ERR_NVGPUCTRPERM"):
        ncu.run(["bench", "kernels"], repeats=7)


def test_missing_ncu_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(ncu, "PLACES", (str(tmp_path / "ncu"), str(tmp_path)))
    with pytest.raises(ValueError, match="neither on the PATH nor in"):
        ncu.find()


# -- the commands --------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["kernels", "check", "dequant"])
def test_without_a_gpu_one_line_says_so(command):
    message = refuse(command)
    assert message.startswith(f"kbit bench {command} needs an NVIDIA GPU: torch ")
    assert "\n" not in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["model", "train", "quantize"])
def test_without_a_gpu_the_line_names_the_option_that_helps(command):
    message = refuse(command, "llama-3-8b")
    assert message.startswith(f"kbit bench {command} needs an NVIDIA GPU: torch ")
    assert message.endswith(". --device cpu measures on the CPU.")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "gatup"], "unknown shape gatup"),
        (["--model", "gpt"], "unknown model gpt"),
        (["-m", "0"], "--rows takes positive whole numbers"),
        (["-m", "one"], "--rows takes positive whole numbers"),
        (["--bits", "6"], "6"),
        (["--dtype", "fp32"], "--dtype takes fp16, bf16"),
        (["--with", "PATH=/x"], "--with takes NAME=VALUE"),
        (["--with", "KBIT_CUDA_FLAGS=-lineinfo"], "of KBIT_BACKEND and KBIT_KERNEL; got"),
    ],
)
def test_bad_options_are_named_before_anything_runs(options, message):
    assert message in refuse("kernels", *options)


def fake_gpu(monkeypatch) -> None:
    """Made-up times in place of a GPU: the command runs to its tables and file."""

    def shape_rows(shape, plan, absent=None):
        if absent is not None:
            absent["torch int4"] = ["takes bfloat16 only, not float16"]
        for count in plan.rows:
            for bits in plan.bits:
                yield from problem(shape.name, count, 10.0, 1.0 + bits, bits, plan.dtype)

    monkeypatch.setattr(kernels, "shape_rows", shape_rows)
    monkeypatch.setattr(gpu_timing, "require_gpu", lambda command: None)
    monkeypatch.setattr(gpu_timing, "read_bandwidth", lambda: gpu_timing.Bandwidth(BANDWIDTH, "made up"))
    about = {"gpu": "H000", "driver": "1", "cuda": "13.0", "torch": "2", "commit": "c", "date": "2026-01-01"}
    monkeypatch.setattr(gpu_timing, "describe", lambda: about)


def test_bench_kernels_prints_and_writes(tmp_path, monkeypatch):
    fake_gpu(monkeypatch)
    file = tmp_path / "kernels.json"
    options = ["--shape", "q,kv", "-m", "1,16", "--bits", "3,4", "--dtype", "fp16,bf16", "--json", file]
    result = run("kernels", *options)
    assert result.exit_code == 0, result.output
    assert "torch int4: takes bfloat16 only" in result.output
    assert "H000, driver 1, CUDA 13.0, torch 2, 4500 GB/s (made up)" in result.output
    for title in ("M=1, fp16", "M=16, fp16", "M=1, bf16", "M=16, bf16"):
        assert title in result.output
    assert "…" not in result.output
    written = json.loads(file.read_text())
    assert {"read_bandwidth_gb_s", "read_bandwidth_method", "timer", "repeats"} <= set(written)
    assert {"gpu", "driver", "cuda", "torch", "commit", "date"} <= set(written["machine"])
    assert len(written["rows"]) == 2 * 2 * 2 * 2 * 4
    assert run("check", "--from", file).exit_code == 0


def test_timer_ncu_repeats_the_choice_on_its_own_command_line(tmp_path, monkeypatch):
    fake_gpu(monkeypatch)
    seen = []

    def ncu_run(arguments, repeats):
        seen.append((arguments, repeats))
        return {"peers_absent": {}}, problem("q", 1, 8.0, 4.0)

    monkeypatch.setattr(ncu, "run", ncu_run)
    variant = ["--with", "KBIT_BACKEND=1,KBIT_KERNEL=2", "--no-peers"]
    options = ["--model", "glm-4.7-flash", "-m", "1,2", "--bits", "4", "--repeats", "9", *variant]
    result = run("kernels", *options, "--timer", "ncu")
    assert result.exit_code == 0, result.output
    words = [
        "bench",
        *[
            "kernels",
            "--shape",
            "glm_gu",
            "--rows",
            "1,2",
            "--bits",
            "4",
            "--dtype",
            "fp16",
            "--repeats",
            "9",
        ],
        *variant,
    ]
    assert seen == [(words, 9)]
    file = tmp_path / "recorded.json"
    recording = run(*words[1:], "--timer", "ncu-record", "--json", file)
    assert recording.exit_code == 0, recording.output
    assert json.loads(file.read_text())["timer"] == "ncu-record"


# -- on a GPU ------------------------------------------------------------------------------------------------


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@gpu
def test_replays_of_a_long_call_take_longer():
    small, large = torch.randn(256, 256, device="cuda"), torch.randn(4096, 4096, device="cuda")
    arms = {name: gpu_timing.Arm([lambda w=w: w @ w] * 4) for name, w in (("small", small), ("large", large))}
    results = gpu_timing.measure(arms, 7)
    assert list(results) == ["small", "large"]
    assert 0 < results["small"].us < results["large"].us


@pytest.mark.gpu
@gpu
def test_the_gpu_says_what_it_is():
    about = gpu_timing.describe()
    assert about["gpu"] == torch.cuda.get_device_name()
    assert about["driver"]
    json.dumps(about)
    bandwidth = gpu_timing.read_bandwidth(7)
    assert 10 < bandwidth.gb_s < 100_000


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_bench_kernels_on_a_small_layer(tmp_path, dtype):
    file = tmp_path / "kernels.json"
    options = ["--shape", "kv", "-m", "1,17", "--dtype", dtype, "--repeats", "7", "--json", file]
    result = run("kernels", *options)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    _, rows = kernel_rows.load(file)
    ours = {(row.kernel, row.rows, row.bits) for row in rows if row.kind == OURS}
    assert ours == set(itertools.product(("kbit", "dq+cublas"), (1, 17), SUPPORTED_BITS))
    assert all(row.us > 0 and row.copies * row.weight_bytes >= 4 * gpu_timing.l2_bytes() for row in rows)


@pytest.mark.gpu
@gpu
def test_bench_dequant_on_a_small_layer():
    result = run("dequant", "--shape", "kv", "-m", "64", "--bits", "4", "--repeats", "7")
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    assert "k=4: dequantize + cuBLAS" in result.output
    assert "kernels over rows alone, fp16" in result.output
