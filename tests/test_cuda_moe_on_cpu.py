"""The kernels around experts, run on the CPU, give what the reference gives, and touch nothing beside it."""

from __future__ import annotations

import itertools

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from guards import guarded, untouched
from kbit.backends import reference
from kbit.backends.cuda import router_logits, routing
from moe_routings import ROUTINGS, not_all_mine, routed

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_moe_on_cpu"), cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("experts", "top_k"), [(1, 1), (31, 31), (33, 4), (128, 8), (130, 3), (500, 10), (1024, 32)]
)
def test_choices(experts, top_k, dtype):
    for tokens, scoring, normalize, biased in itertools.product(
        (1, 5), ("softmax", "sigmoid"), (False, True), (False, True)
    ):
        logits = guarded((torch.randn(tokens, experts) * 3).to(dtype))
        bias = guarded(torch.arange(experts) % 3 * 0.25) if biased else None
        ids = guarded(torch.zeros(tokens, top_k, dtype=torch.int64))
        weights = guarded(torch.zeros(tokens, top_k, dtype=dtype))
        routing.moe_route(logits, scoring, normalize, bias, 1.5, "", ids, weights)
        want = torch.empty_like(ids), torch.empty_like(weights)
        reference.moe_route(logits, scoring, normalize, bias, 1.5, "", *want)
        assert untouched(ids)
        assert untouched(weights)
        scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
        by = scores if bias is None else scores + bias
        # Sums with the bias, and sigmoids near 1, may be equal but for rounding.
        torch.testing.assert_close(by.gather(1, ids), by.gather(1, want[0]), rtol=0, atol=1e-6)
        assert all(len(set(row)) == top_k for row in ids.tolist())
        same = ids == want[0]
        error = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        close = torch.isclose(weights.float(), want[1].float(), rtol=error, atol=1e-7)
        assert bool((close | ~same).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (32, 31), (33, 4), (512, 10)])
def test_a_choice_that_all_tokens_have(experts, top_k, dtype):
    for tokens, shared in itertools.product((1, 5), ("sigmoid", "one")):
        logits = guarded((torch.randn(tokens, experts + (shared == "sigmoid")) * 3).to(dtype))
        have, want = (
            (
                guarded(torch.zeros(tokens, top_k + 1, dtype=torch.int64)),
                guarded(torch.zeros(tokens, top_k + 1, dtype=dtype)),
            )
            for _ in range(2)
        )
        routing.moe_route(logits, "softmax", True, None, 1.5, shared, *have)
        reference.moe_route(logits, "softmax", True, None, 1.5, shared, *want)
        assert all(untouched(each) for each in have)
        assert have[0][:, -1].tolist() == [experts] * tokens
        error = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
        torch.testing.assert_close(have[1][:, -1], want[1][:, -1], rtol=error, atol=1e-7)
        plain = [torch.empty_like(each[:, :-1]) for each in have]
        rest = logits[:, :experts].contiguous()
        routing.moe_route(rest, "softmax", True, None, 1.5, "", *plain)
        assert all(torch.equal(each[:, :-1], alone) for each, alone in zip(have, plain, strict=True))


@pytest.mark.parametrize(("experts", "top_k"), [(64, 4), (129, 8), (512, 10), (1024, 32), (1000, 20)])
def test_choices_that_many_compete_for(experts, top_k):
    """Equal scores, and the largest ones all in a few lanes: more than a warp are as large as the bound."""
    ids = torch.arange(experts)
    of_lanes = torch.where(ids % 128 < 3, 50.0 + ids, 0.0) + torch.where(ids < 32, 100.0, 0.0)
    for logits in (torch.zeros(experts), (ids % 5).float(), of_lanes, -of_lanes, ids.float(), -ids.float()):
        chosen, weights = torch.empty(2, top_k, dtype=torch.int64), torch.empty(2, top_k)
        both = torch.stack([logits, logits.flip(0)]) / experts
        routing.moe_route(both, "sigmoid", True, None, 1.0, "", chosen, weights)
        want = torch.empty_like(chosen), torch.empty_like(weights)
        reference.moe_route(both, "sigmoid", True, None, 1.0, "", *want)
        scores = both.sigmoid()
        assert all(len(set(row)) == top_k for row in chosen.tolist())
        torch.testing.assert_close(scores.gather(1, chosen), scores.gather(1, want[0]), rtol=0, atol=1e-6)
        if scores.unique().numel() <= 5:  # equal ones are so after any rounding
            assert torch.equal(chosen, want[0])


def test_nan_and_infinity_choose_experts_that_there_are():
    logits = torch.randn(4, 40)
    logits[0], logits[1, 7], logits[2], logits[3, 5] = float("nan"), float("nan"), float("-inf"), float("inf")
    ids, weights = torch.empty(4, 6, dtype=torch.int64), torch.empty(4, 6)
    routing.moe_route(logits, "softmax", True, None, 1.0, "", ids, weights)
    assert all(len(set(row)) == 6 and min(row) >= 0 and max(row) < 40 for row in ids.tolist())


@pytest.fixture(params=["of a token", "of experts", "of tokens", "mma"])
def blocks(request, monkeypatch):
    """Which kernel of logits is taken, of which blocks."""
    changes = {"of experts": ("_EACH", {1: 4}), "of tokens": ("_SHARED_BYTES", 0), "mma": ("_FEW", 0)}
    if request.param in changes:
        monkeypatch.setattr(router_logits, *changes[request.param])
    chosen = router_logits.few_block, router_logits.launch_of
    for choose in chosen:
        choose.cache_clear()
    yield request.param
    for choose in chosen:
        choose.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "columns"), [(1, 8), (5, 72), (9, 2048), (4, 2056), (6, 4104), (2, 8200), (70, 264)]
)
def test_logits(experts, columns, dtype, blocks):
    kinds = ((dtype, dtype), (torch.float32, dtype), (torch.float32, torch.float32))
    kinds = kinds[:2] if blocks == "mma" else kinds
    for tokens, (out, held) in itertools.product((1, 3, 4, 13), kinds):
        x = guarded(torch.randn(tokens, columns).to(dtype))
        weight = guarded(torch.randn(experts, columns).to(held))
        logits = router_logits.moe_logits(x, weight, out)
        exact = x.double() @ weight.double().T
        bound = x.double().abs() @ weight.double().abs().T * columns * 2.0**-24
        rounding = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[out]
        assert bool(((logits.double() - exact).abs() <= bound + exact.abs() * rounding).all())
        last = guarded(torch.randn(1, columns).to(held))
        more = router_logits.moe_logits(x, weight, out, last)
        assert torch.equal(more[:, :-1], logits)
        assert torch.equal(more[:, -1:], router_logits.moe_logits(x, last, out))


# One block; several warps that sort; several blocks, in two launches.
@pytest.mark.parametrize(("tokens", "choices", "experts"), [(1, 3, 5), (40, 4, 300), (2100, 2, 9)])
@pytest.mark.parametrize("make", ROUTINGS, ids=lambda make: make.__name__)
def test_sorting(make, tokens, choices, experts):
    for dtype in (torch.int32, torch.int64):
        ids = routed(make, tokens, choices, experts).to(dtype)
        shapes = ((ids.numel(),), (experts + 1,), ids.shape)
        have, want = ([guarded(torch.zeros(s, dtype=torch.int32)) for s in shapes] for _ in range(2))
        routing.moe_align(guarded(ids), *have)
        reference.moe_align(ids, *want)
        assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))
        assert all(untouched(each) for each in have)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "choices", "columns"), [(1, 10, 64), (3, 23, 7), (9, 2, 1032)])
def test_sums(tokens, choices, columns, dtype):
    ids = routed(not_all_mine, tokens, choices, 12)
    _, bounds, inverse = torch.ops.kbit.moe_align(ids, 12)
    for weights_dtype, end in itertools.product(DTYPES, (bounds, None)):
        y = guarded(torch.randn(ids.numel(), columns).to(dtype))
        weights = guarded(torch.rand(ids.shape).to(weights_dtype))
        have, want = (guarded(torch.zeros(tokens, columns, dtype=dtype)) for _ in range(2))
        routing.moe_combine(y, inverse, weights, end, have)
        reference.moe_combine(y, inverse, weights, end, want)
        assert torch.equal(have, want)
        assert untouched(have)
