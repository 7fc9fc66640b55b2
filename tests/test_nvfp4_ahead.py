"""Kernels of NVFP4's layers that are compiled before they are needed: those that forward passes launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cuda_wgmma_on_cpu
import kbit
from cuda_on_cpu import H200
from kbit.backends.cuda import driver, nvfp4, stream, variants
from kbit.backends.cuda.compiler import KernelSpec
from kbit.nn import ahead as of_models
from kbit.nvfp4 import expert_products, folds, gemm, moe, quantize
from kbit.nvfp4.layers import NVFP4Experts, NVFP4Linear, NVFP4Settings, replace_layers
from tiny_models import build

A100 = driver.DeviceLimits(108, 163 * 1024, "80")
SETTINGS = [
    NVFP4Settings(activations, accum, search, ties, row_scale)
    for activations, accum in (("nvfp4", "exact"), ("nvfp4", "seq16"), ("nvfp4", "tc"), ("16bit", "exact"))
    for search, ties, row_scale in ((True, "zero", True), (False, "even", False))
]


class Recorder:
    """In the place of the launcher: notes which kernels are loaded, and launches nothing."""

    def __init__(self) -> None:
        self.specs: set[KernelSpec] = set()

    def load(self, spec: KernelSpec, *_: Any) -> KernelSpec:
        self.specs.add(spec)
        return spec

    def launch_on(self, *_: Any, **__: Any) -> None:
        """Nothing."""


def record(monkeypatch: pytest.MonkeyPatch, limits: driver.DeviceLimits) -> Recorder:
    """Let layers on the CPU call the CUDA backend, as on a GPU with such limits."""
    recorder = Recorder()
    stream.prepared.cache_clear()  # or it would not be loaded
    cuda_wgmma_on_cpu.install(monkeypatch, recorder, limits)
    # What torch has for CUDA alone.
    for module in (nvfp4.tiled, nvfp4.exact_wgmma, nvfp4.moe):
        monkeypatch.setattr(module, "constant", lambda values, device: torch.tensor(values))
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    for module in (gemm, quantize, moe, expert_products, folds):
        monkeypatch.setattr(module, "kernels_for", lambda *_, **__: nvfp4)
    return recorder


@pytest.mark.parametrize("limits", [H200, A100])
@pytest.mark.parametrize("settings", SETTINGS)
def test_of_a_linear_layer_they_are_what_its_forward_loads(
    settings: NVFP4Settings, limits: driver.DeviceLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size, dtype in (((512, 48), torch.bfloat16), ((80, 33), torch.float16), ((4112, 40), torch.bfloat16)):
        layer = NVFP4Linear.from_linear(torch.nn.Linear(*size, bias=False), settings)
        if layer.tileable:
            layer.prepare(force=True)
        with monkeypatch.context() as patch:
            recorder, counts = record(patch, limits), (1, 3, 8, 9, 17, 40, 70, 300)
            for m in counts:
                layer(torch.zeros(m, size[0], dtype=dtype))
            ahead = layer.kernels_ahead(counts, dtype, limits)
            assert set(ahead) == recorder.specs, size
            assert len(ahead) == len(recorder.specs)
            assert recorder.specs <= set(variants.all_specs(limits.arch))


@pytest.mark.parametrize(
    "settings",
    [
        *SETTINGS,
        *(replace(each, dedup="gather") for each in SETTINGS),
        *(replace(each, dedup="scatter", fold=True) for each in SETTINGS if not each.row_scale),
    ],
)
@pytest.mark.parametrize("limits", [H200, A100])
def test_of_experts_they_have_what_a_forward_loads(
    limits: driver.DeviceLimits, settings: NVFP4Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = build("qwen3_moe", torch.bfloat16, spread=False).model.layers[0].mlp.experts
    layer = NVFP4Experts.from_experts(experts, settings)
    recorder = record(monkeypatch, limits)
    if layer.tileable and limits is H200:
        layer.prepare(force=True)
    align = nvfp4.align

    def sort(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """What is written if the first expert has all rows; nothing was launched."""
        align(ids, count)
        rows = torch.arange(ids.numel(), dtype=torch.int32)
        bounds = torch.full((count + 1,), ids.numel(), dtype=torch.int32)
        bounds[0] = 0
        return rows // ids.shape[1], rows, bounds, rows.view_as(ids)

    monkeypatch.setattr(nvfp4, "align", sort)
    for tokens in (1, 5, 40, 200):
        ids = torch.zeros(tokens, 2, dtype=torch.int64)
        x = torch.zeros(tokens, layer.hidden_dim, dtype=torch.bfloat16)
        layer(x, ids, torch.ones(tokens, 2, dtype=torch.bfloat16))
    ahead = layer.kernels_ahead([1], torch.bfloat16, limits)
    assert recorder.specs <= set(ahead)
    assert set(ahead) <= set(variants.all_specs(limits.arch))


def test_a_models_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[KernelSpec, str]] = []

    def compile_many(wanted: Any, on_done: Any) -> list[Any]:
        compiled.extend(wanted)
        return []

    monkeypatch.setattr(of_models, "_gpus", lambda model: [torch.device("cpu")])
    monkeypatch.setattr(of_models, "compile_many", compile_many)
    monkeypatch.setattr(of_models, "folder_problem", lambda folder: None)
    monkeypatch.setattr(of_models.driver, "device_limits", lambda index: H200)
    monkeypatch.setattr(of_models.driver, "device_arch", lambda index: "90a")
    model = build("qwen3_moe", torch.bfloat16, spread=False)
    replace_layers(model, NVFP4Settings(), lambda name: name.endswith(("_proj", "experts")))
    kbit.compile_kernels(model, tokens=[1, 40])
    specs = [spec for spec, _ in compiled]
    assert len(specs) == len(set(specs))
    sources = {spec.source for spec in specs}
    assert {"nvfp4_exact.cu", "nvfp4_exact_wgmma.cu", "nvfp4_quantize_few.cu", "moe_align.cu"} <= sources
    assert "stream.cu" not in sources  # there is no k-bit layer
