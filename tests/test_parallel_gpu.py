"""Two GPUs against one: NCCL, `kbit bench model --gpus`, and sums by GPUs that write to each other."""

import json

import pytest
import torch
from typer.testing import CliRunner

from kbit.cli import app
from parallel_models import build_parallel
from parallel_ranks import distributed_modes, evaluate
from test_parallel import CONFIG, RANKS, check_random, load, random_cases, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
]
NAMES = ("llama", "qwen3_moe")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, results of both ranks); one start of two processes serves every test."""
    folder, cases = tmp_path_factory.mktemp("parallel"), []
    for name in NAMES:
        build_parallel(name).save_pretrained(folder / name)
        load(folder / name, CONFIG).save_pretrained(folder / f"{name}-kbit")
        for mode in distributed_modes(name):
            one = {"mode": mode, "architecture": name, "save": True, "folder": str(folder / f"{name}-kbit")}
            cases.append({"name": f"{name}-{mode}", **one})
    cases += [*random_cases(NAMES), {"name": "sums", "repeats": 1000}]
    return folder, run_ranks(folder, cases, "cuda")


@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in NAMES for mode in distributed_modes(name)]
)
def test_two_gpus_compute_and_save_what_one_does(name, mode, runs):
    folder, ranks = runs
    one = evaluate(load(folder / f"{name}-kbit").cuda())
    first, second = (rank[f"{name}-{mode}"] for rank in ranks)
    for key in ("logits", "gradient"):
        assert torch.equal(first[key], second[key])
        # As on the CPU, but kernels of other shapes add in another order.
        bound = 2.0**-9 * one[key].abs().max() * (16 if key == "logits" else 64)
        assert (first[key] - one[key]).abs().max() <= bound
    assert not first["warnings"]
    assert not second["warnings"]
    assert all(torch.equal(answer, first["answers"][0]) for answer in (*first["answers"], *second["answers"]))
    bound = 2.0**-9 * one["answers"][0][0].abs().max() * 16
    assert (first["answers"][0][0] - one["answers"][0][0]).abs().max() <= bound
    saved = folder / f"saved-{name}-{mode}" / "model.safetensors"
    assert saved.read_bytes() == (folder / f"{name}-kbit" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("case", random_cases(NAMES), ids=lambda case: case["name"])
def test_random_models_built_in_parts_are_those_of_one_gpu(case, runs):
    check_random(case, [rank[case["name"]] for rank in runs[1]], "cuda")


def test_one_shot_sums_are_right_every_time(runs):
    for rank in runs[1]:
        assert rank["sums"] == {"sum": 0, "gather": 0, "replays": 0}


def test_a_rank_that_does_not_come_is_an_error(tmp_path):
    first, _ = run_ranks(tmp_path, [{"name": "alone"}], "cuda")
    assert "CUDA error" in first["alone"]


def test_steps_of_two_gpus_are_captured(tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--layers", "2", "--prompt", "16", "--steps", "8", "--prefill", "64", "--repeats", "2"]
    command = ["bench", "model", "llama-3-8b", *sizes, "--gpus", "1,2", "--json", str(out)]
    result = CliRunner().invoke(app, [*command, "--all-reduce", "nccl,one-shot", "--timeout", "200"])
    assert result.exit_code == 0, result.output
    arms = {arm["name"]: arm for arm in json.loads(out.read_text())["arms"]}
    for name, arm in arms.items():
        if arm["absent"] is None:
            assert all(row["reason"] is None for row in arm["decode"]), name
            assert all(row["vs_one_gpu"] > 0 for row in arm["decode"]), name
    assert arms["kbit k=4, 2 GPUs"]["weight_bytes"] < arms["kbit k=4"]["weight_bytes"]
