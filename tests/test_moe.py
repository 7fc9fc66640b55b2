"""Routing: moe_align, moe_combine, and KbitExperts between them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import kbit
from kbit.backends.cuda import routing
from kbit.nn import KbitExperts
from moe_routings import ROUTINGS, aligned, layer_in_float64, routed, uniform

ops = torch.ops.kbit


# -- moe_align -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ROUTINGS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 1, 1), (1, 4, 6), (33, 3, 7), (70, 2, 40)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_sorted_by_expert(make, tokens, choices, experts, dtype):
    ids = routed(make, tokens, choices, experts).to(dtype)
    for result, expected in zip(ops.moe_align(ids, experts), aligned(ids, experts), strict=True):
        assert result.dtype == torch.int32
        assert torch.equal(result, expected)


def test_no_tokens_and_no_choices():
    for shape in ((0, 3), (3, 0)):
        source, bounds, inverse = ops.moe_align(torch.zeros(shape, dtype=torch.int64), 4)
        assert (source.shape, inverse.shape, bounds.tolist()) == ((0,), shape, [0] * 5)
    y = ops.moe_combine(torch.ones(2, 5), inverse, torch.zeros(3, 0))
    assert torch.equal(y, torch.zeros(3, 5))


@pytest.mark.parametrize(("count", "experts"), [(0, 1), (1, 1), (10, 512), (320, 512), (4096, 1024)])
def test_few_ids_are_sorted_in_one_launch(count, experts):
    plan = routing.align_plan(count, experts)
    assert plan.blocks == 1
    assert plan.per_block >= count


@pytest.mark.parametrize("count", [1, 31, 320, 4096, 4097, 40960, 2**20, 2**30])
@pytest.mark.parametrize("experts", [1, 8, 512, 1024, routing.MAX_EXPERTS])
def test_plans_cover_all_ids(count, experts):
    plan = routing.align_plan(count, experts)
    span = -(-plan.per_block // (32 * plan.sorters)) * 32  # as in moe_align.cu
    assert plan.sorters * span >= plan.per_block
    assert plan.blocks * plan.per_block >= count > (plan.blocks - 1) * plan.per_block
    assert plan.sorters * 32 <= plan.threads <= 1024
    assert plan.shared_bytes <= 48 * 1024


# -- moe_combine ---------------------------------------------------------------------------------------------


def combined(y, inverse, weights, end):
    """The definition: float32, in the order of choices, rounded at the end."""
    total = torch.zeros(len(inverse), y.shape[1])
    for token, slots in enumerate(inverse.tolist()):
        for choice, slot in enumerate(slots):
            if 0 <= slot < end:
                total[token] += weights[token, choice].float() * y[slot].float()
    return total.to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", ROUTINGS, ids=lambda make: make.__name__)
def test_results_are_summed_in_the_order_of_choices(make, dtype, weights_dtype):
    ids = routed(make, 9, 3, 6)
    _, bounds, inverse = ops.moe_align(ids, 6)
    y, weights = torch.randn(27, 21).to(dtype), torch.rand(9, 3).to(weights_dtype)
    y[int(bounds[-1]) :] = float("nan")
    expected = combined(y, inverse, weights, int(bounds[-1]))
    assert torch.equal(ops.moe_combine(y, inverse, weights, bounds), expected)


def test_slots_that_no_row_has_count_as_zero():
    y, weights = torch.randn(4, 5), torch.rand(3, 2)
    inverse = torch.tensor([[0, 4], [-1, 3], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    result = ops.moe_combine(y, inverse, weights)
    assert torch.equal(result, combined(y, inverse, weights, 4))
    assert not result[2].any()


# -- both ----------------------------------------------------------------------------------------------------

IDS = torch.zeros(2, 3, dtype=torch.int64)
BOUNDS = torch.zeros(5, dtype=torch.int32)
Y, INVERSE, WEIGHTS = torch.zeros(6, 8), IDS.int(), torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.moe_align(IDS.float(), 4), TypeError, "int32 or int64, got torch.float32"),
        (lambda: ops.moe_align(IDS[0], 4), ValueError, r"\[tokens, choices\].*got \(3,\)"),
        (lambda: ops.moe_align(IDS, 0), ValueError, "num_experts must be in 1.*, got 0"),
        (lambda: ops.moe_align(IDS, 2**40), ValueError, "num_experts must be in 1.*, got 1099511627776"),
        (lambda: ops.moe_combine(Y.int(), INVERSE, WEIGHTS), TypeError, "y must be float32"),
        (lambda: ops.moe_combine(Y, INVERSE, IDS), TypeError, "weights must be float32"),
        (lambda: ops.moe_combine(Y, IDS, WEIGHTS), TypeError, "must be int32, got torch.int64"),
        (lambda: ops.moe_combine(Y, INVERSE, WEIGHTS, BOUNDS.long()), TypeError, "and torch.int64"),
        (lambda: ops.moe_combine(Y[0], INVERSE, WEIGHTS), ValueError, r"\[R, H\].*got \(8,\)"),
        (lambda: ops.moe_combine(Y, INVERSE, WEIGHTS.T), ValueError, r"\(2, 3\) and \(3, 2\)"),
        (
            lambda: ops.moe_combine(Y, INVERSE, WEIGHTS, BOUNDS[:1]),
            ValueError,
            r"\[experts \+ 1\], got",
        ),
        (lambda: ops.moe_combine(Y, INVERSE, WEIGHTS.to("meta")), ValueError, "weights is on meta, y on cpu"),
    ],
)
def test_wrong_arguments_are_refused_eager_and_traced(call, error, message):
    with pytest.raises(error, match=message):
        call()
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(error, match=message):
        call()


def test_torchs_own_checks_of_the_ops():
    ids = routed(uniform, 5, 2, 4)
    _, bounds, inverse = ops.moe_align(ids, 4)
    torch.library.opcheck(ops.moe_align, (ids, 4))
    weights = torch.rand(5, 2)
    for extra in ((), (bounds,)):
        given = (torch.randn(10, 8), inverse, weights, *extra)
        torch.library.opcheck(ops.moe_combine.default, given)
        torch.library.opcheck(ops.moe_combine.out, given, {"out": torch.empty(5, 8)})


def test_combined_rows_go_where_they_are_told():
    _, bounds, inverse = ops.moe_align(routed(uniform, 5, 2, 4), 4)
    y, weights, out = torch.randn(10, 8), torch.rand(5, 2), torch.full((5, 8), float("nan"))
    assert ops.moe_combine(y, inverse, weights, bounds, out=out) is None
    assert torch.equal(out, ops.moe_combine(y, inverse, weights, bounds))
    with pytest.raises(ValueError, match="moe_combine: out must"):
        ops.moe_combine(y, inverse, weights, bounds, out=torch.empty(4, 8))


# -- KbitExperts ---------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Fused experts as transformers holds them."""

    def __init__(self, experts=6, hidden=64, intermediate=32):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * intermediate, hidden) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, intermediate) * 0.1)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        weights = (self.gate_up_proj, self.down_proj)
        return layer_in_float64(*weights, hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)


def quantized(tiled=False, **sizes):
    torch.manual_seed(0)
    layer = KbitExperts.from_experts(Experts(**sizes), 4, kbit.QuantizationPolicy())
    layer.prepare(force=tiled)
    return layer


@pytest.mark.parametrize("tiled", [False, True], ids=["canonical", "tiled"])
@pytest.mark.parametrize("make", ROUTINGS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("tokens", [1, 2, 33, 256])
def test_the_layer_is_exact_and_repeats(tokens, make, tiled):
    layer = quantized(tiled)
    ids = routed(make, tokens, 3, 6)
    x, weights = torch.randn(tokens, 64), torch.rand(ids.shape)
    result = layer(x, ids, weights)
    expected = layer_in_float64(*map(layer.dequantize, layer.shapes), x, ids, weights)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(result, layer(x, ids, weights))
    assert torch.equal(result, layer(x, ids.int(), weights))


def test_training_and_inference_agree():
    layer = quantized()
    ids = routed(ROUTINGS[4], 17, 3, 6)
    x, weights = torch.randn(17, 64, requires_grad=True), torch.rand(17, 3, requires_grad=True)
    trained = layer(x, ids, weights)
    with torch.no_grad():
        torch.testing.assert_close(layer(x, ids, weights), trained, rtol=1e-5, atol=1e-6)
    trained.square().sum().backward()
    gradients = x.grad, weights.grad
    x, weights = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    layer_in_float64(*map(layer.dequantize, layer.shapes), x, ids, weights).square().sum().backward()
    for gradient, expected in zip(gradients, (x.grad, weights.grad), strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_of_other_devices_may_hold_anything(monkeypatch):
    layer = quantized()
    ids = routed(ROUTINGS[4], 17, 3, 6)
    x, weights = torch.randn(17, 64), torch.rand(17, 3)
    expected = layer(x, ids, weights)
    grouped = KbitExperts.grouped

    def poisoned(self, rows, name, bounds, **options):
        result = grouped(self, rows, name, bounds, **options)
        result[int(bounds[-1]) :] = float("nan")
        return result

    monkeypatch.setattr(KbitExperts, "grouped", poisoned)
    assert torch.equal(layer(x, ids, weights), expected)


def test_experts_that_compute_something_of_their_own_stay():
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    class Scaled(Qwen3MoeExperts):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return super().forward(hidden_states.clamp(-1, 1), top_k_index, top_k_weights)

    config = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=48, num_experts=4)

    def made(kind):
        experts = kind(config)
        for weight in experts.parameters():
            nn.init.normal_(weight)
        return experts

    held = made(Qwen3MoeExperts)
    held.out_scale = nn.Parameter(torch.ones(4))
    for experts in (made(Scaled), held):
        model = nn.ModuleDict({"experts": experts})
        kbit.quantize_model(model, kbit.QuantizationPolicy(bits=5))
        assert model["experts"] is experts
    model = nn.ModuleDict({"experts": made(Qwen3MoeExperts)})
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=5))
    assert isinstance(model["experts"], KbitExperts)
