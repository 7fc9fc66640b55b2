"""`kbit bench nvfp4` without a GPU: its arms run on the CPU's reference, timed by nothing."""

from __future__ import annotations

import json

import pytest
import torch

from kbit.bench import gpu_timing, nvfp4, nvfp4_layer, nvfp4_levers
from kbit.bench.gpu_timing import GpuTiming
from kbit.bench.routings import ROUTINGS
from kbit.bench.shapes import LayerShape
from kbit.nvfp4 import reference, tiles_nvfp4
from kbit.nvfp4.moe import DEDUP

SIZE = nvfp4_layer.LayerSize(hidden=64, experts=6, chosen=2, width=32)


def call_each(arms, repeats) -> dict[str, GpuTiming]:
    for arm in arms.values():
        for call in arm.calls:
            call()
    return {name: GpuTiming(float(i + 1), 0.0) for i, name in enumerate(arms)}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (nvfp4, nvfp4_layer, nvfp4_levers):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(gpu_timing, "l2_bytes", lambda: 1)


def test_quantize_and_gemm_rows() -> None:
    rows = list(nvfp4.quantize_rows([3], 7, call_each))
    assert [row.arm for row in rows] == ["search", "plain", "search, row scales", "plain, row scales"]
    assert rows[0].nbytes == rows[2].nbytes - 3 * 4 == 3 * 2048 * (2 * 16 + 9) // 16
    rows = list(nvfp4.gemm_rows(LayerShape("tiny", "none", 128, 48, 1, "test"), [2], 7, call_each))
    by_contract = ["tc", "tc, layout nv", "seq16", "exact", "exact, layout nv"]
    assert [row.arm for row in rows][:7] == [nvfp4.CUBLAS, nvfp4.DEQUANTIZE, *by_contract]
    assert [row.arm for row in rows][7:] == [nvfp4.OUTLIERS, nvfp4.WEIGHT_ONLY, "quantize + tc"]
    items = json.loads(json.dumps(nvfp4.as_json(rows)))
    assert items[0]["vs_bf16"] == 1.0
    assert items[1]["vs_bf16"] == 0.5


def test_outliers_are_some_channels_of_all_tokens() -> None:
    x = torch.ones(3, 2 * nvfp4.OUTLIER_EVERY)
    changed = nvfp4._with_outliers(x) != x
    assert changed.sum(1).tolist() == [2, 2, 2]
    assert torch.equal(changed.all(0), changed.any(0))


def test_levers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every choice that changes no bit, and one that does is refused."""
    cuts = nvfp4_levers.kernels
    monkeypatch.setattr(cuts, "quantize_cut", lambda x, cut, *how: reference.quantize(x, *how))
    rows = list(nvfp4_levers.quantizer_rows([3], 7, call_each))
    assert [row.arm for row in rows] == [nvfp4_levers.CHOSEN, *cuts.CUTS]
    assert rows[0].nbytes == 3 * 2048 * (2 * 16 + 9) // 16
    rows = list(nvfp4_levers.product_rows(LayerShape("tiny", "none", 128, 48, 1, "test"), [2], 7, call_each))
    assert [row.problem for row in rows if row.arm == nvfp4_levers.CHOSEN] == [
        "tiny, tc",
        "tiny, seq16",
        "tiny, exact",
    ]
    assert [row.arm for row in rows if row.problem == "tiny, exact"][1:] == list(tiles_nvfp4("exact"))
    monkeypatch.setattr(cuts, "quantize_cut", lambda x, cut, *how: reference.quantize(x + 1, *how))
    with pytest.raises(ValueError, match="8 lanes, at 3 rows differs"):
        list(nvfp4_levers.quantizer_rows([3], 7, call_each))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_layer_rows(routing: str) -> None:
    rows = list(nvfp4_layer.layer_rows([3], [routing], ["exact"], 7, call_each, SIZE))
    layer = {row.arm: row for row in rows if row.part == "layer"}
    assert set(DEDUP) < set(layer)
    assert layer["off"].quantized_rows == 9
    assert layer["gather"].quantized_rows == layer["indirect"].quantized_rows == 3
    assert layer["gather"].copied_rows == layer["scatter"].copied_rows == 6
    assert all(row.nbytes > 0 for row in rows)


@pytest.mark.parametrize("fold", [False, True])
def test_all_arms_of_the_layer_compute_the_same(fold: bool) -> None:
    layer = nvfp4_layer.make_layer(SIZE, 0)
    batch = nvfp4_layer.make_batch(SIZE, 5, "zipf", 0)
    expected = nvfp4_layer.run_layer(layer, batch, "off", "exact", False)
    for dedup in DEDUP:
        assert torch.equal(nvfp4_layer.run_layer(layer, batch, dedup, "exact", fold), expected)
