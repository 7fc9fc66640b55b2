"""`kbit bench moe`: arms compute what they claim, routings, ratios, the command; real runs on a GPU."""

from __future__ import annotations

import functools
import json

import pytest
import torch
from typer.testing import CliRunner

from kbit.bench import moe, moe_layer, moe_router
from kbit.bench.gpu_timing import GpuTiming
from kbit.bench.kernel_rows import BASELINE, OURS
from kbit.bench.moe import MoeRow
from kbit.bench.routings import ROUTINGS
from kbit.cli import app
from kbit.nn.router import FusedRouter

CPU = torch.device("cpu")
SIZE = moe_layer.LayerSize(experts=16, chosen=4, hidden=64, width=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_grouped_arm_computes_the_products(dtype):
    weights = moe.make_grouped((64, 48), 5, (3, 4), CPU, dtype)
    x = torch.randn(5, 6, 64).to(dtype)
    arms = moe.grouped_arms(weights, x)
    names = {(kernel, bits, kind) for kernel, bits, kind, _ in arms}
    both = dtype == torch.bfloat16  # no graph can record float16's grouped_mm
    baselines = [("bmm", None, BASELINE), *([("grouped_mm", None, BASELINE)] if both else [])]
    assert names == {*baselines, ("kbit", 3, OURS), ("kbit", 4, OURS)}
    expected = torch.bmm(x.float(), weights.dense[0].float().transpose(-2, -1))
    for (_, bits, _, nbytes), arm in arms.items():
        assert nbytes == (weights.dense[0] if bits is None else weights.packed[bits][0]).nbytes
        for call in arm.calls:
            error = (call().view(expected.shape).float() - expected).norm() / expected.norm()
            assert error < {None: 0.01, 3: 0.3, 4: 0.15}[bits]
    moe._check_grouped(weights, x, arms)


def test_wrong_products_are_not_measured():
    weights = moe.make_grouped((64, 48), 2, (4,), CPU)
    x = torch.randn(2, 3, 64).to(torch.bfloat16)
    arms = moe.grouped_arms(weights, 2 * x)
    with pytest.raises(ValueError, match=r"bench moe: kbit, k=4, \(2, 3, 64\) is wrong: relative error"):
        moe._check_grouped(weights, x, arms)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_every_layer_arm_computes_the_layer(tokens, routing):
    layers = moe_layer.make_layers(SIZE, tokens, (4,), CPU)
    routed = moe_layer.route(routing, tokens, SIZE, CPU)
    moe_layer.check_layer(layers.ours[4][0], routed)
    arms = moe_layer.layer_arms(layers, routed)
    batched = tokens <= moe_layer.BATCHED_MM_TOKENS
    assert [label[0] for label in arms] == ["grouped_mm", *(["batched_mm"] if batched else []), "kbit"]
    results = {label[0]: [call() for call in arm.calls] for label, arm in arms.items()}
    expected = results["grouped_mm"][0].float()
    for found in (one for many in results.values() for one in many):
        assert (found.float() - expected).norm() / expected.norm() < 0.3
    used = routed.ids.unique().numel()
    (dense, *_, ours) = (label[3] for label in arms)
    assert dense == used * 3 * SIZE.hidden * SIZE.width * 2
    assert 0.25 < ours / dense < 0.32


@pytest.mark.parametrize("size", moe_router.SIZES)
def test_every_router_arm_chooses_the_same(size):
    routers = moe_router.make_routers(*size, CPU, hidden=64)
    assert [isinstance(copies[0], FusedRouter) for copies in routers.values()] == [False, True]
    x = torch.randn(5, 64).to(torch.bfloat16)
    arms = moe_router.router_arms(routers, x)
    assert [(kernel, kind) for kernel, _, kind, _ in arms] == [("transformers", BASELINE), ("kbit", OURS)]
    results = [call() for arm in arms.values() for call in arm.calls]
    assert results[0][2].shape == (5, size[1])
    assert all(torch.equal(a, b) for found in results for a, b in zip(found, results[0], strict=True))


def test_zipf_is_skewed_and_choices_differ():
    size = moe_layer.LayerSize()
    counts = {}
    for routing in ROUTINGS:
        ids = moe_layer.route(routing, 256, size, CPU).ids
        assert all(len(set(row)) == size.chosen for row in ids.tolist())
        counts[routing] = ids.flatten().bincount(minlength=size.experts).max().item()
    assert counts["zipf"] > 5 * counts["uniform"]
    with pytest.raises(ValueError, match="unknown routing round; known: uniform, zipf"):
        moe_layer.route("round", 1, size, CPU)


def test_ratios_are_to_bmm_and_to_the_fastest_16_bit_path():
    rows = [
        MoeRow("gu, 8 experts", 4, None, "bmm", BASELINE, 8.0, 0.0, 4, 16000),
        MoeRow("gu, 8 experts", 4, None, "grouped_mm", BASELINE, 6.0, 0.0, 4, 16000),
        MoeRow("gu, 8 experts", 4, 4, "kbit", OURS, 2.0, 0.0, 4, 4250),
        MoeRow("layer, zipf", 4, 4, "kbit", OURS, 2.0, 0.0, 4, 4250),
    ]
    items = moe.as_json(rows)
    assert [item["vs_bmm"] for item in items] == [1.0, 1.333, 4.0, None]
    assert [item["vs_best_16_bit"] for item in items] == [0.75, 1.0, 3.0, None]
    assert items[2]["gb_s"] == 2.1


def test_rows_say_what_was_measured():
    weights = moe.make_grouped((64, 48), 2, (4,), CPU)
    arms = moe.grouped_arms(weights, torch.randn(2, 3, 64).to(torch.bfloat16))

    def timer(arms, repeats):
        return {label: GpuTiming(float(repeats), 0.5) for label in arms}

    rows = list(moe.measured("gu, 2 experts", 3, arms, 7, timer))
    assert [(row.kernel, row.rows, row.us, row.copies) for row in rows] == [
        ("bmm", 3, 7.0, 2),
        ("grouped_mm", 3, 7.0, 2),
        ("kbit", 3, 7.0, 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "gu,up"], "--shape takes gu, dn, joined by commas; got 'gu,up'"),
        (["--routing", "none"], "--routing takes uniform, zipf, joined by commas; got 'none'"),
        (["--batch", "0"], "--batch takes positive whole numbers"),
        (["--dtype", "fp32"], "--dtype takes fp16 or bf16; got 'fp32'"),
        (["--dtype", "fp16"], "--dtype fp16 is for --part grouped"),
    ],
)
def test_wrong_options_are_refused(arguments, message):
    result = CliRunner().invoke(app, ["bench", "moe", *arguments])
    assert result.exit_code == 1
    assert message in str(result.exception)


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path, monkeypatch):
    # Of Qwen3-Next's 512 experts, cold copies are 30 GB.
    monkeypatch.setattr(moe_layer, "LayerSize", functools.partial(moe_layer.LayerSize, experts=64))
    out = tmp_path / "moe.json"
    command = ["--experts", "8", "--rows", "1,64", "--batch", "1,32", "--repeats", "7", "--json", str(out)]
    result = CliRunner().invoke(app, ["bench", "moe", *command])
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["rows"]
    assert {row["problem"] for row in rows} == {
        "gu, 8 experts",
        "dn, 8 experts",
        "layer, uniform",
        "layer, zipf",
        "router, 8 of 128",
        "router, 10 of 512",
    }
    assert all(row["us"] > 0 and row["copies"] >= 2 for row in rows)
