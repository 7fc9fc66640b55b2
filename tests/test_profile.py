"""`kbit profile`: attribution of overlapping kernels by hand and by invariants, and whole models on a CPU."""

from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PretrainedConfig
from typer.testing import CliRunner

import kbit
from kbit.backends.cuda.compiler import CSRC
from kbit.bench import profile, profile_plot
from kbit.bench.kernel_kinds import kind_of
from kbit.bench.profile import Part, StepProfile
from kbit.cli import app
from tiny_models import build


def test_overlaps_belong_to_what_started_first():
    """a 0..10; b starts within a, so it has 10..14; c within b only; d after a gap of 5."""
    intervals = [("b", 8, 14), ("a", 0, 10), ("c", 9, 12), ("d", 19, 20), ("a", 20, 22)]
    assert profile.attribute(intervals) == {"a": 12, "b": 4, "c": 0, "d": 1}
    window, times, calls = profile.timeline(intervals)
    assert window == 22
    assert sum(times.values()) == 17
    assert calls == {"a": 2, "b": 1, "c": 1, "d": 1}


def test_no_kernel_is_an_error():
    with pytest.raises(ValueError, match="saw no kernel"):
        profile.timeline([])


INTERVALS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 60), st.integers(1, 20)).map(
        lambda item: (item[0], item[1], item[1] + item[2])
    ),
    min_size=1,
    max_size=20,
)


@given(INTERVALS)
def test_times_sum_to_when_anything_runs(intervals):
    times = profile.attribute(intervals)
    busy = {moment for _, start, end in intervals for moment in range(start, end)}
    assert sum(times.values()) == len(busy)
    for name, us in times.items():
        own = {moment for other, start, end in intervals if other == name for moment in range(start, end)}
        assert 0 <= us <= len(own)


def test_ceilings_by_hand():
    part = Part("stream", "kbit", 3, 75.0, 100.0)
    assert (part.share, part.step_without_us, part.ceiling) == (0.75, 25.0, 4.0)
    whole = Part("stream", "kbit", 3, 100.0, 100.0)
    assert whole.ceiling == math.inf
    parts = (part, Part("wgmma", "kbit", 1, 5.0, 100.0), Part("copy", "copy", 2, 10.0, 100.0))
    found = StepProfile("cuda", 1, 8, 100.0, 110.0, 0.9, None, parts)
    kbit_group, copies = found.groups
    assert (kbit_group.kernel, kbit_group.calls, kbit_group.us) == ("kbit", 4, 80.0)
    assert kbit_group.ceiling == pytest.approx(5)
    assert copies.us == 10
    written = profile.as_json(StepProfile("cuda", 1, 8, 100.0, 110.0, 1.0, None, (whole,)), "m")
    assert written["kernels"][0]["ceiling"] is None
    json.loads(json.dumps(written, allow_nan=False))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kbit::linear", "kbit"),
        ("stream", "kbit"),
        ("moe_combine", "kbit routing"),
        ("norm_logits", "kbit routing"),
        ("gated_delta_rule", "linear attention"),
        ("latent_combine", "attention"),
        ("latent_heads", "rotary, cache, masks"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "sums over GPUs"),
        ("nvfp4_gemm", "nvfp4"),
        ("aten::addmm", "16-bit products"),
        ("nvjet_hsh_64x8_64x16", "16-bit products"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void at::native::sbtopk::gatherTopK<float, unsigned int, 2>", "sort, top-k"),
        ("aten::_to_copy", "copy, gather, index"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("aten::silu", "elementwise"),
        ("something else", "other"),
    ],
)
def test_kernels_are_sorted_by_what_they_are_for(name, kind):
    assert kind_of(name) == kind


def test_no_kernel_of_ours_is_something_else():
    assert not [path.stem for path in CSRC.glob("*.cu") if kind_of(path.stem) == "other"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("profile") / "tiny"
    model = build("qwen3_moe", torch.float32)
    kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    model.save_pretrained(target)
    return target


def test_step_of_a_model_on_a_cpu():
    model = build("llama", torch.float32)
    kbit.quantize_model(model, kbit.KbitConfig(bits=3))
    found = profile.profile_step(model, batch=2, context=5, steps=3, repeats=2)
    assert (found.device, found.batch, found.context) == ("cpu", 2, 5)
    assert found.reason == "no CUDA graphs on cpu"
    # Each of the two layers has seven linear ones.
    calls = {part.kernel: part.calls for part in found.kernels}
    assert calls["kbit::linear"] == 14
    assert sum(part.share for part in found.kernels) == pytest.approx(1, abs=0.02)
    assert sum(part.us for part in found.groups) == pytest.approx(found.step_us, rel=0.02)
    assert 0 < found.busy < 1
    times = [part.us for part in found.kernels]
    assert times == sorted(times, reverse=True)


def test_command(folder, tmp_path):
    file = tmp_path / "profile.json"
    arguments = [str(folder), "--device", "cpu", "--steps", "2", "--context", "4", "--top", "3"]
    result = CliRunner().invoke(app, ["profile", *arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "a step, cpu busy" in result.output
    written = json.loads(file.read_text())
    assert written["machine"]["threads"] >= 1
    (about,) = written["profiles"]
    assert (about["model"], about["arm"], about["graph"], about["context"]) == ("tiny", "", False, 4)
    assert "kbit::grouped_linear" in {part["kernel"] for part in about["kernels"]}
    assert about["groups"]
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(app, ["bench", "report", str(tmp_path), "--out", str(page)])
    assert shown.exit_code == 0, shown.output
    assert "kbit::grouped_linear" in page.read_text()


def test_random_weights_in_several_ways(tmp_path):
    """A profile for each width, 16-bit implementation of experts and batch; the picture has the fastest."""
    config, file = tmp_path / "small.json", tmp_path / "profile.json"
    config.write_text(json.dumps(build("qwen3_moe", torch.float32).config.to_dict()))
    arguments = ["--random", str(config), "--layers", "1", "--bits", "3", "--baseline", "--batch", "1,2"]
    short = ["--device", "cpu", "--steps", "1", "--context", "2", "--json", str(file)]
    result = CliRunner().invoke(app, ["profile", *arguments, *short])
    assert result.exit_code == 0, result.output
    found = [(one["model"], one["arm"], one["batch"]) for one in json.loads(file.read_text())["profiles"]]
    arms = ("kbit k=3", "bf16 grouped_mm", "bf16 batched_mm")
    assert sorted(found) == sorted(("small", arm, batch) for arm in arms for batch in (1, 2))
    result = CliRunner().invoke(app, ["bench", "plot", str(file), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "profile-small.png").read_bytes().startswith(b"\x89PNG")


def test_parts_of_a_picture_by_hand():
    def one(arm, step, **groups):
        parts = [{"group": group, "us": us} for group, us in groups.items()]
        return {"arm": arm, "batch": 1, "step_us": step, "groups": parts}

    profiles = [
        one("bf16 grouped_mm", 210.0, products=200.0),
        one("bf16 batched_mm", 200.0, products=150.0, copies=1.0, sorting=2.0),
        one("kbit k=4", 60.0, kbit=40.0, copies=9.0, other=5.0),
    ]
    shown = profile_plot.fastest(profiles)
    assert [each["arm"] for each in shown] == ["bf16 batched_mm", "kbit k=4"]
    assert profile_plot.parts(shown) == {
        "products": [150.0, 0.0],
        "kbit": [0.0, 40.0],
        "copies": [1.0, 9.0],
        "other": [2.0, 5.0],
        "nothing runs": [47.0, 6.0],
    }


@pytest.mark.parametrize("given", [[], ["folder", "--random", "llama-3-8b"]])
def test_command_takes_a_folder_or_a_name(given):
    result = CliRunner().invoke(app, ["profile", *given])
    assert "profile takes a model's folder, or --random and a model's name" in str(result.exception)


def test_a_step_is_recorded_on_the_gpu_that_has_the_model(folder, monkeypatch):
    """A CUDA graph of another one would be empty, and take no time."""
    chosen = []

    def profile_step(model, *options):
        assert chosen == [torch.device("cuda:1")]
        raise ValueError("far enough")

    monkeypatch.setattr("kbit.bench.gpu_timing.require_gpu", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    there = SimpleNamespace(device=torch.device("cuda:1"), config=PretrainedConfig())
    monkeypatch.setattr(sys.modules["kbit.cli.profile"], "load_model", lambda *_: there)
    monkeypatch.setattr(profile, "profile_step", profile_step)
    result = CliRunner().invoke(app, ["profile", str(folder), "--device", "cuda:1"])
    assert "far enough" in str(result.exception)


def test_command_refuses(tmp_path):
    result = CliRunner().invoke(app, ["profile", str(tmp_path)])
    assert isinstance(result.exception, FileNotFoundError)
    assert "has no config.json" in str(result.exception)


@pytest.mark.gpu
def test_step_of_a_model_on_a_gpu():
    model = build("llama", torch.float16).cuda()
    kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    found = profile.profile_step(model, batch=1, context=5, steps=4, repeats=3)
    assert found.reason is None
    assert 0 < found.busy <= 1
    kernels = [part for part in found.kernels if part.group == "kbit"]
    # q, k and v of a layer are one; up's rows cannot follow gate's, which end within a tile
    assert sum(part.calls for part in kernels) >= 10
    assert sum(part.us for part in found.kernels) <= found.step_us * 1.001
    eager = profile.profile_step(model, context=5, steps=4, graph=False, repeats=3)
    assert eager.reason == "not asked for"
    assert eager.busy < found.busy
