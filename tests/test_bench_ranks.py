"""`kbit bench model --gpus`: ranks that it starts itself, here two processes on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from kbit.backends.cuda.ranks import Inboxes
from kbit.bench import model as bench
from kbit.bench import model_ranks
from kbit.bench.model_split import ENVIRONMENT, rank_environment
from kbit.cli import app
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers import collectives
from parallel_models import PARALLEL
from tiny_models import write_config

PLAN = bench.Plan(batches=(1, 2), prompt=3, steps=2, prefill=4, repeats=1)


@pytest.fixture
def config_file(tmp_path, request):
    """The config.json of a tiny model, perhaps with other sizes."""
    name, sizes = request.param
    config = PARALLEL[name]()
    config.update(sizes)
    path = tmp_path / "config.json"
    return str(write_config(config, path))


@pytest.mark.parametrize("config_file", [("llama", {})], indirect=True)
def test_the_command_on_two_ranks(config_file, tmp_path):
    out = tmp_path / "result.json"
    sizes = ["--batch", "1,2", "--prompt", "3", "--steps", "2", "--prefill", "4", "--repeats", "1"]
    command = ["bench", "model", config_file, "--device", "cpu", *sizes, "--gpus", "1,2"]
    result = CliRunner().invoke(app, [*command, "--all-reduce", "one-shot,nccl", "--json", str(out)])
    assert result.exit_code == 0, result.output
    arms = json.loads(out.read_text())["arms"]
    one, plain, absent, plain_of_two, two = arms
    assert (plain["name"], plain_of_two["name"]) == ("bf16", "bf16, 2 GPUs")  # measured once
    assert (one["name"], two["name"]) == ("kbit k=4", "kbit k=4, 2 GPUs")
    assert 0.4 < two["weight_bytes"] / one["weight_bytes"] < 0.8
    assert [row["batch"] for row in two["decode"]] == [1, 2]
    for before, after in zip(one["decode"], two["decode"], strict=True):
        assert after["vs_one_gpu"] == pytest.approx(before["ms"] / after["ms"], abs=1e-3)
        assert after["arm"] == "kbit k=4, 2 GPUs"
        assert after["vs_bf16"] > 0
    assert two["prefill_tokens_s"] > 0
    assert absent["name"] == "kbit k=4, all-reduce one-shot, 2 GPUs"
    assert absent["absent"] == "one-shot all-reduces are for GPUs, got cpu"


@pytest.mark.parametrize("config_file", [("llama", {"intermediate_size": 96})], indirect=True)
def test_a_rank_that_fails_says_why(config_file):
    job = model_ranks.Job(config_file, None, PLAN, {"kbit k=4": QuantizationPolicy()}, "cpu", timeout_s=60)
    with pytest.raises(RuntimeError, match=r"(?s)rank \d of 2 failed \(1\).*96 in-features into 48 each"):
        list(model_ranks.measure(job, 2))


def test_ranks_that_take_too_long_are_stopped(tmp_path):
    policies = {"bf16": None}
    job = model_ranks.Job(str(tmp_path / "no.json"), None, PLAN, policies, "cpu", timeout_s=0.1)
    with pytest.raises(RuntimeError, match=r"rank 0 of 2 was not done after 0 s"):
        list(model_ranks.measure(job, 2))


def test_jobs_survive_the_way_to_another_process():
    policies = {"kbit k=3": QuantizationPolicy(bits=3, embedding_bits=4, search=False), "bf16": None}
    job = model_ranks.Job("llama-3-70b", 4, PLAN, policies, by_expert=True, all_reduce="one-shot")
    again = model_ranks.Job.from_json(job.to_json())
    assert again.policies == policies
    assert (again.plan.prompt, again.plan.dtype) == (3, torch.bfloat16)
    assert again.to_json() == job.to_json()


def test_multicast_is_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    first, second = rank_environment(2)
    assert first.items() >= ENVIRONMENT.items()
    assert (first["RANK"], second["RANK"], first["WORLD_SIZE"]) == ("0", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert rank_environment(2)[0]["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "0"], "--gpus takes positive whole numbers"),
        (["--all-reduce", "ring"], "ring"),
    ],
)
def test_wrong_options_are_refused(options, message):
    result = CliRunner().invoke(app, ["bench", "model", "llama-3-8b", "--device", "cpu", *options])
    assert result.exit_code == 1
    assert message in str(result.exception)


def test_more_gpus_than_there_are_is_an_error():
    with pytest.raises(ValueError, match=r"--gpus 99: torch sees \d+ GPUs"):
        model_ranks.check("cuda", 99)


class _Group:
    group_name = "ranks"


@pytest.mark.parametrize("numel", [0, 6, 8, 2**20])
def test_sums_that_do_not_fit_go_to_the_group(numel, monkeypatch):
    """One-shot sums take what fits into the memory shared, at whole 8 bytes."""
    asked = []
    monkeypatch.setattr(collectives.dist, "all_reduce", lambda x, group: asked.append("group"))
    group, inboxes = _Group(), Inboxes([1, 2], torch.zeros(3, dtype=torch.int32), 0, 64, 600)
    monkeypatch.setitem(collectives._mapped, "ranks", collectives._Mapped(group, inboxes.state, inboxes))

    class Ops:
        @staticmethod
        def one_shot_sum(x, *given):
            assert given == inboxes
            asked.append("ranks")
            return x.clone()

    monkeypatch.setattr(torch.ops, "kbit", Ops)
    collectives.all_reduce(torch.zeros(numel, dtype=torch.bfloat16), group)
    collectives.all_reduce(torch.zeros(numel, dtype=torch.float32), group)
    collectives.all_reduce(torch.zeros(numel, dtype=torch.bfloat16), _Group())  # made anew
    assert asked == ["ranks" if numel == 8 else "group", "group", "group"]


@pytest.mark.parametrize(
    ("rank", "capacity", "x", "error"),
    [
        (0, 64, torch.zeros(8), "must be float16 or bfloat16, got torch.float32"),
        (2, 64, torch.zeros(8).half(), "got 2 and rank 2"),
        (0, 64, torch.zeros(6).half(), "a multiple of 8 bytes"),
        (0, 1, torch.zeros(8).half(), "8 bytes at most"),
        (0, 64, torch.zeros(8).half(), "ranks must be GPUs"),
    ],
)
def test_what_one_shot_sums_refuse(rank, capacity, x, error):
    state = torch.zeros(3, dtype=torch.int32)
    for op in (torch.ops.kbit.one_shot_sum, torch.ops.kbit.one_shot_gather):
        with pytest.raises((TypeError, ValueError), match=error):
            op(x, [1, 2], state, rank, capacity, 600)
    with pytest.raises(TypeError, match="state must be int32"):
        torch.ops.kbit.one_shot_sum(torch.zeros(8).half(), [1, 2], state.long(), 0, 64, 600)
    with pytest.raises(ValueError, match="seconds must be at least 1, got 0"):
        torch.ops.kbit.one_shot_sum(torch.zeros(8).half(), [1, 2], state, 0, 64, 0)
