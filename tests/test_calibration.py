"""Quantizing by sample inputs: `quantize_model(calibration=...)`, and the GPTQ of one weight."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BatchEncoding

import kbit
from kbit.format import SUPPORTED_BITS, reference
from kbit.format.scales import ABSMAX_FORMATS
from kbit.nn import KbitExperts, KbitLinear, calibration, early_end
from kbit.quantizers import calibrated
from tiny_models import build

IDS = torch.randint(70, (6, 16), generator=torch.Generator().manual_seed(0))


def correlated(rows: int, columns: int) -> torch.Tensor:
    """Activations of which few directions are large, as those of language models."""
    made = torch.Generator().manual_seed(0)
    mixed = torch.randn(columns, columns, generator=made) * torch.logspace(0, -2, columns)
    return torch.randn(rows, columns, generator=made) @ mixed.t()


def decoded(parts: tuple[torch.Tensor, ...], codebook: torch.Tensor, columns: int) -> torch.Tensor:
    packed, absmax, scale = parts
    return reference.dequantize(packed, absmax, codebook, scale, columns, torch.float32)


@pytest.mark.parametrize("form", list(ABSMAX_FORMATS))
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("columns", [96, 100])
def test_products_come_out_closer(bits: int, form: str, columns: int) -> None:
    w, (x, unseen) = torch.randn(24, columns), correlated(800, columns).split(400)
    codebook = kbit.normal_float(bits)
    parts = calibrated.quantize(
        w, calibrated.spread_of(x.t() @ x, torch.tensor(len(x))), codebook, form, search=True
    )
    plain = kbit.dequantize(kbit.quantize(w, bits, scale=form))
    error, before = (
        (unseen @ (v - w).t()).square().sum() for v in (decoded(parts, codebook, columns), plain)
    )
    assert error < 0.8 * before
    q = kbit.QuantizedTensor(*parts[:2], codebook, parts[2], bits, tuple(w.shape))
    assert torch.equal(kbit.dequantize(q), decoded(parts, codebook, columns))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("few", [1, 16, 96])
def test_few_activations_do_no_harm(bits: int, few: int) -> None:
    """Those that were not seen have an error that is hardly larger than by search, whatever the few are."""
    w, codebook = torch.randn(64, 128), kbit.normal_float(bits)
    before = after = 0.0
    for _ in range(8):
        seen, unseen = correlated(few + 2000, 128).split([few, 2000])
        spread = calibrated.spread_of(seen.t() @ seen, torch.tensor(few))
        parts = calibrated.quantize(w, spread, codebook, "e4m4", search=True)
        before += float((unseen @ (kbit.dequantize(kbit.quantize(w, bits)) - w).t()).square().sum())
        after += float((unseen @ (decoded(parts, codebook, 128) - w).t()).square().sum())
    assert after < 1.02 * before


@pytest.mark.parametrize("search", [False, True])
def test_without_activations_it_is_the_default_quantizer(search: bool) -> None:
    w, codebook = torch.randn(3, 8, 70), kbit.normal_float(4)
    spread = calibrated.spread_of(torch.zeros(3, 70, 70), torch.zeros(3))
    packed, absmax, scale = calibrated.quantize(w, spread, codebook, "e4m4", search)
    q = kbit.quantize(w, 4, search=search)
    assert torch.equal(packed, q.packed)
    assert torch.equal(absmax, q.absmax)
    assert torch.equal(scale, q.scale)


def test_a_stack_is_its_matrices() -> None:
    w, x, codebook = torch.randn(3, 8, 64), torch.randn(3, 100, 64), kbit.normal_float(3)
    hessians, counts = x.transpose(1, 2) @ x, torch.tensor([100.0, 10.0, 1000.0])
    stack = calibrated.quantize(w, calibrated.spread_of(hessians, counts), codebook, "e4m4", True)
    for i in range(3):
        one = calibrated.quantize(w[i], calibrated.spread_of(hessians[i], counts[i]), codebook, "e4m4", True)
        torch.testing.assert_close(
            decoded(tuple(part[i] for part in stack), codebook, 64), decoded(one, codebook, 64)
        )


@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("form", list(ABSMAX_FORMATS))
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_block_scales_by_a_kernel_are_the_same(bits: int, form: str, search: bool) -> None:
    """Also of a matrix whose factor is not 1, and where blocks alone would have one."""
    ran = []

    def alone(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ran.append(torch.ops.kbit.quantize(block, codebook, bits, form, search))
        return ran[-1]

    x, codebook = correlated(200, 100), kbit.normal_float(bits)
    w = torch.randn(4, 24, 100) * torch.tensor([1.0, 1e-7, 1e5, 1.0])[:, None, None]
    w[3, :, 32:64] *= 1e-7
    spread = calibrated.spread_of((x.t() @ x).expand(4, -1, -1), torch.full((4,), 200.0))
    for given in ((w, spread), (w[:3], spread[:3]), (w[0], spread[0])):
        ran.clear()
        found = calibrated.quantize(*given, codebook, form, search, alone)
        for mine, other in zip(found, calibrated.quantize(*given, codebook, form, search), strict=True):
            assert torch.equal(mine, other)
        assert len(ran) == 4


@pytest.mark.parametrize("size", [1e-30, 1e20, 1e30])
def test_block_scales_of_weights_of_any_size(size: float) -> None:
    w, codebook = torch.randn(8, 32) * size, kbit.normal_float(4)
    given = w, calibrated.spread_of(torch.eye(32), torch.tensor(32)), codebook, "e4m4", True
    by_kernel = calibrated.quantize(
        *given, lambda block: torch.ops.kbit.quantize(block, codebook, 4, *given[3:])
    )
    assert all(map(torch.equal, calibrated.quantize(*given), by_kernel))
    far = (decoded(by_kernel, codebook, 32) / size - w / size).abs().max()
    assert far < 0.3


def test_what_becomes_nan_on_the_way_is_said(monkeypatch) -> None:
    monkeypatch.setattr(calibrated, "spread_of", lambda sums, counts: torch.full((64, 64), torch.nan))
    model = nn.Sequential(nn.Linear(64, 8))
    with pytest.raises(
        ValueError, match=r"the columns of 0.weight became NaN or Inf. Its weights are finite"
    ):
        kbit.quantize_model(model, kbit.QuantizationPolicy(), calibration=[torch.randn(3, 64)])


def divergence(model: nn.Module, reference_model: nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        p, q = (m(ids).logits.log_softmax(-1) for m in (reference_model, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "granitemoe"])
def test_a_model_comes_out_closer_saves_and_reloads(architecture: str, tmp_path) -> None:
    base = build(architecture, torch.float32)
    config = kbit.KbitConfig(bits=3)
    plain = kbit.quantize_model(copy.deepcopy(base), config)
    seen = []
    model = kbit.quantize_model(
        copy.deepcopy(base), config, lambda done, total, name: seen.append((done, total)), [IDS]
    )
    assert seen[-1][0] == seen[-1][1] == len(seen)
    assert {type(m) for m in model.modules()} == {type(m) for m in plain.modules()}
    assert divergence(model, base, IDS) < divergence(plain, base, IDS)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_layers_in_front_are_quantized_already(monkeypatch) -> None:
    """With room for one layer's sums at a time, each pass is over a model that is quantized so far."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    states, call = [], calibration._call
    monkeypatch.setattr(calibration, "HESSIAN_BYTES", 1)
    monkeypatch.setattr(
        calibration,
        "_call",
        lambda m, sample: (states.append([isinstance(layer, KbitLinear) for layer in m]), call(m, sample)),
    )
    kbit.quantize_model(model.train(), kbit.QuantizationPolicy(bits=2), calibration=[torch.randn(9, 64)])
    assert states == [[False, False, False], [True, False, False], [True, True, False]]
    assert all(layer.training for layer in model)
    assert not any(layer._forward_pre_hooks for layer in model)


def test_autocast_changes_nothing_but_the_models_own_products() -> None:
    """The first layer's activations are the same; in float16 their sums of squares would overflow."""
    x = 6 * torch.randn(4096, 64)
    model = nn.Sequential(nn.Linear(64, 64))
    policy = kbit.QuantizationPolicy(bits=3)
    expected = kbit.quantize_model(copy.deepcopy(model), policy, calibration=[x])
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            got = kbit.quantize_model(copy.deepcopy(model), policy, calibration=[x])
        for name, part in expected.state_dict().items():
            assert torch.equal(got.state_dict()[name], part), name


def test_samples_may_be_arguments() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return self.up(x * scale)

    x, layers = torch.randn(50, 32), []
    for sample in ((x, 2.0), {"x": x, "scale": 2.0}, 2 * x):
        torch.manual_seed(0)
        model = kbit.quantize_model(Both(), kbit.QuantizationPolicy(bits=2), calibration=[sample])
        layers.append(model.up.weight_packed)
    assert torch.equal(layers[0], layers[1])
    assert torch.equal(layers[0], layers[2])


def test_samples_may_hold_tensors_in_containers() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 8)

        def forward(self, given: dict[str, list[torch.Tensor]]) -> torch.Tensor:
            return self.linear(given["x"][0])

    model = kbit.quantize_model(
        Reader(), kbit.QuantizationPolicy(), calibration=[({"x": [torch.ones(2, 32)]},)]
    )
    assert isinstance(model.linear, KbitLinear)


def test_experts_of_which_nothing_is_seen_are_quantized_as_ever() -> None:
    base = build("qwen3_moe", torch.float32)
    few = kbit.quantize_model(copy.deepcopy(base), kbit.KbitConfig(bits=4), calibration=[IDS[:1, :2]])
    plain = kbit.quantize_model(copy.deepcopy(base), kbit.KbitConfig(bits=4))
    pairs = [
        (one, other)
        for one, other in zip(few.modules(), plain.modules(), strict=True)
        if isinstance(one, KbitExperts)
    ]
    same = [
        torch.equal(one.down_proj_packed[e], other.down_proj_packed[e])
        for one, other in pairs
        for e in range(one.num_experts)
    ]
    assert any(same)
    assert not all(same)


def test_samples_may_be_what_a_tokenizer_gives() -> None:
    ids = torch.randint(1, 30, (1, 12), generator=torch.Generator().manual_seed(0))
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = []
    for given in (sample, BatchEncoding(sample)):
        model = build("llama", torch.float32)
        kbit.quantize_model(model, kbit.QuantizationPolicy(bits=2), calibration=[given])
        found.append(model.state_dict())
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


def test_what_cannot_be_calibrated_is_named() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"samples feed NaN or Inf to 0, so it cannot be calibrated"):
        kbit.quantize_model(model, kbit.QuantizationPolicy(), calibration=[torch.full((2, 32), torch.inf)])
    for samples, error, message in (
        (torch.randn(2, 32), TypeError, r"calibration must be a list of samples, got Tensor.*split\(1\)"),
        ([], ValueError, "calibration has no samples"),
        (["a text"], TypeError, "a calibration sample is a text. Give the tokenizer's ids"),
        ([np.zeros((2, 32))], TypeError, r"got ndarray. Of an array: torch.as_tensor\(array\)"),
        ([[1, 2, 3]], TypeError, r"has no tensor in it. Of ids: torch.tensor\(ids\), \[B, T\]"),
        ([torch.arange(9)], ValueError, r"must be a batch of ids \[B, T\], got \(9,\)"),
    ):
        with pytest.raises(error, match=message):
            kbit.quantize_model(model, kbit.QuantizationPolicy(), calibration=samples)
    empty = nn.ModuleDict({"up": nn.Linear(32, 32, device="meta")})
    with pytest.raises(ValueError, match=r"up\.weight is on the meta device"):
        kbit.quantize_model(empty, kbit.QuantizationPolicy(), calibration=[torch.randn(2, 32)])
    assert not any(isinstance(layer, KbitLinear) for layer in model)
    model[1].weight.data[0, 0] = torch.nan
    with pytest.raises(kbit.NonFiniteWeightError, match="1.weight"):
        kbit.quantize_model(model, kbit.QuantizationPolicy(), calibration=[torch.randn(2, 32)])
    assert not any(isinstance(layer, KbitLinear) for layer in model)  # it was found in front of all


@contextlib.contextmanager
def running_whole(model: nn.Module, names: list[str]):
    yield lambda call: call()


@pytest.mark.parametrize("room", [1, calibration.HESSIAN_BYTES])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_runs_end_behind_the_layers_in_work(architecture: str, room: int, monkeypatch) -> None:
    monkeypatch.setattr(calibration, "HESSIAN_BYTES", room)
    config, samples = kbit.KbitConfig(bits=3, search=False), list(IDS.split(1))
    assert len(samples) > 1
    models, calls = [build(architecture, torch.float32) for _ in range(2)], []
    for model, run in zip(models, (early_end.ending_early, running_whole), strict=True):
        monkeypatch.setattr(calibration, "ending_early", run)
        count = collections.Counter()
        for name in ("lm_head", "model.layers.0", "model.layers.1"):
            module = model.get_submodule(name)
            module.register_forward_hook(lambda *_, name=name, count=count: count.update([name]))
        kbit.quantize_model(model, config, calibration=samples)
        calls.append(count)
    one, other = (model.state_dict() for model in models)
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    early, whole = calls
    passes = whole["lm_head"] // len(samples)
    assert early["lm_head"] == passes
    assert early["model.layers.0"] == whole["model.layers.0"]
    assert early["model.layers.1"] < whole["model.layers.1"] or room > 1


def test_models_that_call_layers_again_run_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in [*self.layers] * 2:
                x = layer(x)
            return x

    model, seen = Twice(), []
    model.layers[0].register_forward_pre_hook(lambda *given: seen.append(given[1][0]))
    with early_end.ending_early(model, ["layers.0"]) as run:
        for _ in range(3):
            run(functools.partial(model, torch.randn(2, 32)))
    assert len(seen) == 6
    assert len(model.layers[0]._forward_pre_hooks) == 1
    assert not model.layers[1]._forward_pre_hooks


@pytest.mark.parametrize("names", [["0"], ["2"]])
def test_models_without_lists_and_heads_run_whole(names: list[str]) -> None:
    model, seen = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), []
    model[2].register_forward_hook(lambda *given: seen.append(1))
    with early_end.ending_early(model, names) as run:
        for _ in range(2):
            run(functools.partial(model, torch.randn(2, 32)))
    assert len(seen) == 2
