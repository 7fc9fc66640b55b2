"""The choice of experts: `kbit::moe_route`, and routers that choose by it."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.autograd import forward_ad

import kbit
from kbit.backends import cuda, reference
from kbit.backends.cuda import driver, router_logits
from kbit.nn import router
from tiny_models import build

ops = torch.ops.kbit
gpu = pytest.mark.gpu

# Of a model's router, and whether it chooses by softmax.
ROUTERS = {
    "qwen3_moe": "Qwen3MoeTopKRouter",
    "qwen3_next": "Qwen3NextTopKRouter",
    "mixtral": "MixtralTopKRouter",
    "glm4_moe_lite": "Glm4MoeLiteTopkRouter",
}


def defined(logits, top_k, scoring, normalize, bias=None, factor=1.0):
    """(ids, weights in float64) by the definition, token by token."""
    logits = logits.double()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    all_ids, all_weights = [], []
    for token in scores:
        by = (token if bias is None else token + bias.double()).tolist()
        ids = sorted(range(len(by)), key=lambda i: (-by[i], i))[:top_k]
        weights = token[ids]
        all_ids.append(ids)
        all_weights.append(weights / weights.sum() * factor if normalize else weights * factor)
    return torch.tensor(all_ids), torch.stack(all_weights)


def distinct(tokens, experts, seed=0):
    """Logits whose scores differ by more than rounding, in any order."""
    generator = torch.Generator().manual_seed(seed)
    orders = torch.stack([torch.randperm(experts, generator=generator) for _ in range(tokens)])
    return orders * (12 / experts) - 6


# -- the ops -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 1, 1), (3, 8, 8), (5, 128, 8), (2, 512, 10)])
def test_experts_with_the_largest_scores(tokens, experts, top_k, scoring, normalize):
    logits, bias = distinct(tokens, experts), torch.randn(experts)
    for added in (None, bias):
        ids, weights = ops.moe_route(logits, top_k, scoring, normalize, added, 1.5)
        expected = defined(logits, top_k, scoring, normalize, added, 1.5)
        assert ids.dtype == torch.int64
        assert torch.equal(ids, expected[0])
        torch.testing.assert_close(weights.double(), expected[1], rtol=1e-5, atol=1e-9)


def test_equal_scores_go_to_smaller_ids():
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0], [0.0] * 6])
    for scoring in ("softmax", "sigmoid"):
        ids, _ = ops.moe_route(logits, 5, scoring, True)
        assert ids.tolist() == [[1, 3, 4, 2, 5], [0, 1, 2, 3, 4]]


def test_nan_is_the_largest():
    ids, weights = ops.moe_route(torch.tensor([[1.0, float("nan"), 3.0]]), 2, "sigmoid", False)
    assert ids.tolist() == [[1, 2]]
    assert weights.isnan().tolist() == [[True, False]]


def test_no_tokens_give_no_choices():
    ids, weights = ops.moe_route(torch.zeros(0, 4), 2, "softmax", True)
    assert ids.shape == weights.shape == (0, 2)


def test_weights_are_rounded_once_to_the_logits_dtype():
    logits = distinct(4, 32).bfloat16()
    weights = ops.moe_route(logits, 6, "softmax", True)[1]
    assert torch.equal(weights, defined(logits, 6, "softmax", True)[1].bfloat16())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 3, dtype=torch.int32)}, "moe_route: logits must be"),
        ({"logits": torch.zeros(3)}, r"must be \[T, E\], got \(3,\)"),
        ({"top_k": 0}, "top_k must be in 1..3, the number of experts, got 0"),
        ({"top_k": 4}, "top_k must be in 1..3, the number of experts, got 4"),
        ({"scoring": "relu"}, "one of softmax, sigmoid, got 'relu'"),
        ({"bias": torch.zeros(3, dtype=torch.float64)}, "bias must be float32, got torch.float64"),
        ({"bias": torch.zeros(4)}, r"bias must be \[3\] on cpu, got \(4,\)"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {"logits": torch.zeros(2, 3), "top_k": 2, "scoring": "softmax", "bias": None} | change
    with pytest.raises((TypeError, ValueError), match=message):
        ops.moe_route(*list(arguments.values())[:3], True, arguments["bias"])


def test_logits_are_a_product():
    x, weight = torch.randn(3, 40).bfloat16(), torch.randn(9, 40).bfloat16()
    assert torch.equal(ops.moe_logits(x, weight), nn.functional.linear(x, weight))
    wide = ops.moe_logits(x, weight, torch.float32)
    assert torch.equal(wide, nn.functional.linear(x.float(), weight.float()))
    assert torch.equal(ops.moe_logits(x, weight.float(), torch.float32, weight[:1].float())[:, :-1], wide)


@pytest.mark.parametrize(
    ("x", "weight", "dtype", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(3, 8).half(), None, "weight must be torch.float32 beside x in"),
        (
            torch.zeros(2, 8).half(),
            torch.zeros(3, 8).bfloat16(),
            None,
            "must be torch.float16 or torch.float32 beside",
        ),
        (torch.zeros(2, 8).half(), torch.zeros(3, 8).half(), torch.bfloat16, "got torch.bfloat16 for x in"),
        (torch.zeros(2, 8).half(), torch.zeros(3, 8), None, "and a weight in torch.float32"),
        (torch.zeros(2, 8), torch.zeros(3, 7), None, r"got \(2, 8\) on cpu and \(3, 7\) on cpu"),
        (torch.zeros(8), torch.zeros(3, 8), None, r"x must be \[T, K\]"),
        (torch.zeros(2, 8).int(), torch.zeros(3, 8).int(), None, "moe_logits: x must be"),
    ],
)
def test_bad_operands_are_refused(x, weight, dtype, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ops.moe_logits(x, weight, dtype)


def test_the_ops_pass_pytorch_s_checks():
    torch.library.opcheck(ops.moe_logits.default, (torch.randn(3, 8), torch.randn(5, 8)))
    torch.library.opcheck(ops.moe_route.default, (torch.randn(3, 9), 4, "softmax", True))
    torch.library.opcheck(ops.moe_route.default, (torch.randn(3, 9), 4, "sigmoid", True, torch.randn(9), 2.0))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 6), st.integers(1, 40), st.data())
def test_choices_are_distinct_and_by_falling_score(tokens, experts, data):
    top_k = data.draw(st.integers(1, experts))
    logits = torch.randint(-3, 4, (tokens, experts)).float()  # many are equal
    ids, weights = ops.moe_route(logits, top_k, "softmax", True)
    assert all(len(set(row)) == top_k for row in ids.tolist())
    assert torch.equal(ids, defined(logits, top_k, "softmax", True)[0]) if tokens else not ids.numel()
    assert bool((weights.diff(dim=-1) <= 0).all())


# -- the kernel ----------------------------------------------------------------------------------------------

SIZES = [(1, 1), (8, 2), (31, 31), (32, 8), (33, 32), (64, 6), (128, 8), (160, 6), (256, 8), (512, 10)]
SIZES += [(513, 22), (1000, 32), (1024, 1), (1025, 4), (128, 33)]  # the last two: torch's sort


def test_more_tokens_than_a_grid_has_go_to_cublas():
    kinds = (torch.bfloat16, True, True)
    assert router_logits.launch_of(kinds, 65535, 4, 8).grid[1] <= driver.MAX_GRID_Y
    assert router_logits.launch_of(kinds, 65536, 4, 8) is None


LOGITS = [(1, 8), (8, 64), (64, 576), (128, 2048), (512, 2048), (5, 2040), (513, 2056), (160, 5120)]
LOGITS += [(9, 36)]  # cuBLAS: rows of no whole pieces


@gpu
@pytest.mark.parametrize(
    ("out", "held"), [(None, None), (torch.float32, None), (torch.float32, torch.float32)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("experts", "columns"), LOGITS)
def test_logits_are_right_and_repeat(experts, columns, dtype, out, held):
    weight = torch.randn(experts, columns, device="cuda").to(held or dtype)
    for tokens in (0, 1, 2, 3, 4, 8, 9, 33, 64, 300):
        x = torch.randn(tokens, columns, device="cuda").to(dtype)
        logits = ops.moe_logits(x, weight, out)
        assert logits.dtype == (out or dtype)
        kinds = (dtype, logits.dtype == torch.float32, held is not None)
        if router_logits.launch_of(kinds, tokens, experts, columns) is None or columns % 8:
            kind = out or dtype
            assert torch.equal(logits, nn.functional.linear(x.to(kind), weight.to(kind)))
            continue
        assert all(torch.equal(ops.moe_logits(x, weight, out), logits) for _ in range(20))
        exact, sizes = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        rounding = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[logits.dtype]
        bound = sizes * columns * 2.0**-24 + exact.abs() * rounding + 1e-30
        assert bool(((logits.double() - exact).abs() <= bound).all()), tokens
    one_hot = torch.eye(columns, device="cuda", dtype=dtype)[:4]
    assert torch.equal(ops.moe_logits(one_hot, weight, held), weight[:, :4].T)


@gpu
@pytest.mark.parametrize("tokens", [1, 20])
def test_a_weight_written_just_before_is_read(tokens):
    x = torch.ones(tokens, 2048, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(512, 2048, device="cuda", dtype=torch.bfloat16)
    for turn in range(200):
        weight.fill_(turn % 7)
        assert bool((ops.moe_logits(x, weight) == turn % 7 * 2048).all())


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_the_kernel_equals_the_reference(experts, top_k, dtype):
    error = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    settings = itertools.product((1, 3, 4, 130), ("softmax", "sigmoid"), (False, True), (False, True))
    for tokens, scoring, normalize, biased in settings:
        logits = distinct(tokens, experts)
        if dtype != torch.float32:  # many of them equal, and then their scores are, too
            logits = (logits * 8).round().div(8).to(dtype)
        bias = (torch.arange(experts) % 7 - 3) * 0.5 if biased else None
        shape = (tokens, top_k)
        have = [torch.full(shape, -7, device="cuda"), torch.full(shape, -7.0, device="cuda", dtype=dtype)]
        want = [torch.empty_like(tensor, device="cpu") for tensor in have]
        reference.moe_route(logits, scoring, normalize, bias, 2.5, "", *want)
        cuda.moe_route(
            logits.cuda(), scoring, normalize, None if bias is None else bias.cuda(), 2.5, "", *have
        )
        ids, weights = (tensor.cpu() for tensor in have)
        same = ids == want[0]
        if biased:  # sums may be nearer to each other than the GPU's exponential is to the CPU's
            scores = (logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)) + bias
            torch.testing.assert_close(scores.gather(1, ids), scores.gather(1, want[0]), rtol=0, atol=1e-6)
        else:
            assert bool(same.all()), (tokens, scoring, normalize)
        close = torch.isclose(weights.float(), want[1].float(), rtol=error, atol=1e-7)
        assert bool((close | ~same).all()), (tokens, scoring, normalize)


@gpu
def test_the_kernel_repeats_and_stays_in_range():
    logits = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    logits[7], logits[8, 5], logits[9] = float("nan"), float("nan"), float("-inf")
    logits[10, 3], logits[11] = float("inf"), 0
    first = ops.moe_route(logits, 10, "softmax", True)
    ordered = first[0].sort(-1).values
    assert bool((ordered.diff(dim=-1) > 0).all())
    assert int(ordered[:, 0].min()) >= 0
    assert int(ordered[:, -1].max()) < 512
    assert first[0][11].tolist() == list(range(10))
    for _ in range(200):
        again = ops.moe_route(logits, 10, "softmax", True)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1].view(torch.int16), first[1].view(torch.int16))


@gpu
def test_a_graph_records_it():
    logits = torch.randn(3, 128, device="cuda", dtype=torch.bfloat16)
    ops.moe_route(logits, 8, "softmax", True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = ops.moe_route(logits, 8, "softmax", True)
    logits.copy_(torch.randn(3, 128))
    graph.replay()
    expected = ops.moe_route(logits, 8, "softmax", True)
    assert torch.equal(ids, expected[0])
    assert torch.equal(weights, expected[1])


# -- routers -------------------------------------------------------------------------------------------------


def quantized(name, dtype=torch.bfloat16, **changes):
    model = build(name, dtype).eval()
    for module in routers(model):
        vars(module).update(changes)
    return kbit.quantize_model(model, kbit.KbitConfig(bits=4, search=False))


def routers(model):
    return [module for module in model.modules() if "router" in type(module).__name__.lower()]


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_beside_quantized_experts_are_fused(name):
    model = quantized(name)
    assert routers(model)
    for module in routers(model):
        assert isinstance(module, router.FusedRouter)
        assert type(module).__name__ == f"Kbit{ROUTERS[name]}"
        assert module.own in type(module).__mro__  # still what the model's own code looks for
    plain = build(name, torch.bfloat16)
    assert {each for each in model.state_dict() if "gate.weight" in each} == {
        each for each in plain.state_dict() if "gate.weight" in each
    }


@pytest.mark.parametrize("name", ROUTERS)
def test_a_fused_router_gives_what_its_class_gives(name):
    for module in routers(quantized(name, torch.float32)):
        x = torch.randn(2, 5, module.weight.shape[1])
        with torch.no_grad():
            want, have = module.own.forward(module, x), module.route(x)
            assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(want, have, strict=True))
            assert router._equal(want, have)
            assert all(torch.equal(a, b) for a, b in zip(module(x), want, strict=True))  # on a CPU its own


def test_a_weight_in_float32_of_activations_in_16_bits():
    """As transformers keeps DeepSeek's and GLM's from 5.24 on."""
    for module in routers(quantized("glm4_moe_lite")):
        module.weight = nn.Parameter(torch.randn(module.weight.shape), requires_grad=False)
        x = torch.randn(5, module.weight.shape[1]).bfloat16()
        assert router._equal(module.own.forward(module, x), module.route(x))


# Without a tiny model of their own here: (its module, its config, the router, what the config is given).
OTHERS = [
    ("qwen2_moe", "Qwen2MoeConfig", "Qwen2MoeTopKRouter", {"num_experts": 8, "num_experts_per_tok": 3}),
    ("olmoe", "OlmoeConfig", "OlmoeTopKRouter", {"num_experts": 8, "num_experts_per_tok": 3}),
    ("glm4_moe", "Glm4MoeConfig", "Glm4MoeTopkRouter", {"n_routed_experts": 8, "num_experts_per_tok": 3}),
    (
        "deepseek_v3",
        "DeepseekV3Config",
        "DeepseekV3TopkRouter",
        {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 1, "topk_group": 1},
    ),
]


@pytest.mark.parametrize(("model", "config", "name", "sizes"), OTHERS, ids=lambda value: str(value)[:12])
def test_other_models_routers_are_known(model, config, name, sizes):
    module = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    made = getattr(module, name)(getattr(module, config)(hidden_size=64, **sizes))
    block = Experts(made)
    router.fuse_routers(block)
    assert isinstance(block.gate, router.FusedRouter)


def test_copies_and_pickles_are_fused():
    (module,) = routers(quantized("qwen3_moe"))
    x = torch.randn(3, module.weight.shape[1], dtype=torch.bfloat16)
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(again) is type(module)
        assert again.weight is not module.weight
        assert all(torch.equal(a, b) for a, b in zip(again(x), module(x), strict=True))


def test_dequantizing_gives_their_class_back():
    model = quantized("qwen3_moe")
    kbit.dequantize_model(model)
    assert [type(module).__name__ for module in routers(model)] == ["Qwen3MoeTopKRouter"]


def test_choice_within_groups_stays_with_the_model():
    for groups, fused in ((1, True), (2, False)):
        model = quantized("glm4_moe_lite", num_group=groups, topk_group=1)
        assert isinstance(routers(model)[0], router.FusedRouter) == fused


class Experts(nn.Module):
    """A block whose router has a known name."""

    def __init__(self, gate):
        super().__init__()
        self.gate, self.experts = gate, kbit.nn.KbitExperts(8, 64, 32, nn.SiLU())


def test_a_class_that_computes_something_else_stays():
    class MixtralTopKRouter(nn.Module):
        def __init__(self):
            super().__init__()
            self.top_k, self.weight = 2, nn.Parameter(torch.zeros(8, 64))

        def forward(self, x):
            logits = x @ self.weight.T
            weights, ids = logits.float().softmax(-1).topk(self.top_k)
            return logits, weights.to(logits.dtype), ids  # they do not sum to 1

    class OlmoeTopKRouter(MixtralTopKRouter):
        norm_topk_prob = False

    class Qwen2MoeTopKRouter(MixtralTopKRouter):
        def forward(self, x, mask):
            raise AssertionError

    class DeepseekV3TopkRouter(MixtralTopKRouter):
        """Without a bias."""

    known = {MixtralTopKRouter: False, OlmoeTopKRouter: True, Qwen2MoeTopKRouter: False}
    for kind, fused in (known | {DeepseekV3TopkRouter: False}).items():
        block = Experts(kind())
        router.fuse_routers(block)
        assert isinstance(block.gate, router.FusedRouter) == fused, kind


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ROUTERS)
def test_on_a_gpu_kernels_choose(name, dtype):
    for module in routers(quantized(name, torch.float32)):
        module.to("cuda", dtype)
        x = torch.randn(6, module.weight.shape[1], device="cuda", dtype=dtype)
        with torch.no_grad():
            have, want = module(x), module.own.forward(module, x)
            with torch.profiler.profile() as profile:
                module(x)
        assert any("moe_route" in event.name for event in profile.events())
        assert [a.dtype for a in have] == [a.dtype for a in want]
        torch.testing.assert_close(have[0], want[0])
        if dtype == torch.float32:
            assert router._equal(want, have)
            compiled = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
            assert router._equal(compiled, have)
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.randn_like(x))
            assert forward_ad.unpack_dual(module(dual)[0]).tangent is not None
        # Adapters may train on what stands before it.
        logits, weights, _ = module(x.requires_grad_())
        (logits.sum() + weights.sum()).backward()
        assert x.grad is not None
