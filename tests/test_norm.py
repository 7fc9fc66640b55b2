"""RMS norms in one kernel: the op, and norms of models that run by it."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn

import kbit
from kbit.backends import cuda, reference
from kbit.backends.cuda import norm as kernel
from kbit.nn import norm
from tiny_models import build

ops = torch.ops.kbit
gpu = pytest.mark.gpu

# (plus_one, round_first) of a class of transformers.
CLASSES = {
    "llama.LlamaRMSNorm": (False, True),
    "qwen3_moe.Qwen3MoeRMSNorm": (False, True),
    "glm4_moe_lite.Glm4MoeLiteRMSNorm": (False, True),
    "olmo2.Olmo2RMSNorm": (False, False),
    "qwen3_next.Qwen3NextRMSNorm": (True, False),
    "gemma2.Gemma2RMSNorm": (True, False),
}
ORDERS = [(False, True), (False, False), (True, False), (True, True)]


def made(name, columns=48, dtype=torch.bfloat16, device="cpu"):
    """A norm of transformers with random weights."""
    family, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = getattr(module, kind)(columns, eps=1e-5).to(device, dtype)
    nn.init.normal_(own.weight)
    return own


def defined(x, weight, eps, plus_one):
    """In float64."""
    x, weight = x.double(), weight.double() + plus_one
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def require_norm(y, x, weight, eps, plus_one):
    """Compare with the definition: two roundings, and those of a sum in float32."""
    want, unit = defined(x, weight, eps, plus_one), torch.finfo(y.dtype).eps
    error = (y.double() - want).abs()
    few = 8 * 2.0**-24 + x.shape[-1] ** 0.5 * 2.0**-24
    assert bool((error <= want.abs() * (1.1 * unit + few) + torch.finfo(y.dtype).tiny).all())


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(48,), (0, 48), (3, 48), (2, 5, 1), (1, 2, 3, 17)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from(ORDERS),
    st.sampled_from([0.0, 1e-6, 0.5]),
)
def test_the_definition(shape, dtype, order, eps):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    y = ops.rms_norm(x, weight, eps, *order)
    assert (y.shape, y.dtype, y.is_contiguous()) == (x.shape, dtype, True)
    require_norm(y, x, weight, eps, order[0])


def test_strided_operands():
    x, weight = torch.randn(5, 96)[:, ::2].bfloat16(), torch.randn(96).bfloat16()[::2]
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), ops.rms_norm(x.clone(), weight.clone(), 1e-6))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8, dtype=torch.int32)}, "rms_norm: x must be"),
        ({"weight": torch.zeros(8).half()}, r"weight must be torch.float32 like x, got torch.float16"),
        ({"weight": torch.zeros(7)}, r"x must be \[..., D\] and weight \[D\]"),
        ({"weight": torch.zeros(1, 8)}, r"x must be \[..., D\] and weight \[D\]"),
        ({"x": torch.tensor(1.0)}, r"x must be \[..., D\] and weight \[D\]"),
        ({"eps": -1.0}, "eps must be a number of 0 or more, got -1"),
        ({"eps": float("nan")}, "eps must be a number of 0 or more, got nan"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "eps": 1e-6} | change
    with pytest.raises((TypeError, ValueError), match=message):
        ops.rms_norm(*arguments.values())


@pytest.mark.parametrize(
    ("added", "message"),
    [
        (torch.zeros(2, 8).half(), "added must be torch.float32 like x, got torch.float16"),
        (torch.zeros(8), r"added must be \(2, 8\) on cpu like x, got \(8,\) on cpu"),
        (torch.zeros(2, 8, device="meta"), "added must be .* like x, got .* on meta"),
    ],
)
def test_what_cannot_be_added_is_refused(added, message):
    with pytest.raises((TypeError, ValueError), match=f"add_rms_norm: {message}"):
        ops.add_rms_norm(torch.zeros(2, 8), added, torch.zeros(8), 1e-6)
    with pytest.raises(ValueError, match=r"add_rms_norm: x must be \[..., D\]"):
        ops.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8), torch.zeros(7), 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_norm_of_a_sum(dtype):
    for shape in ((48,), (0, 48), (2, 3, 17)):
        x, added = torch.randn(2, *shape).to(dtype)
        weight = torch.randn(shape[-1]).to(dtype)
        total, y = ops.add_rms_norm(x, added, weight, 1e-6, True, False)
        assert torch.equal(total, x + added)
        assert torch.equal(y, ops.rms_norm(x + added, weight, 1e-6, True, False))


def test_opcheck():
    x, weight = torch.randn(3, 8), torch.randn(8)
    torch.library.opcheck(ops.rms_norm.default, (x, weight, 1e-6, True, False))
    torch.library.opcheck(ops.add_rms_norm.default, (x, x + 1, weight, 1e-6, True, False))


# -- norms of models -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_classes_of_transformers_are_known(name):
    own = made(name)
    kind = norm._kind(own)
    assert kind is not None
    assert (kind.plus_one, kind.round_first) == CLASSES[name]
    block = nn.ModuleList([own])
    x = torch.randn(3, 48).bfloat16()
    with torch.no_grad():
        want = own(x)
        norm.fuse_norms(block)
        assert isinstance(own, norm.FusedNorm)
        assert type(own).__name__ == f"Fused{name.partition('.')[2]}"
        assert torch.equal(own(x), want)  # on a CPU, by its own forward
        assert torch.equal(ops.rms_norm(x, own.weight, 1e-5, *CLASSES[name]), want)


class Scaled(nn.Module):
    """No RMS norm, but like one from outside."""

    def __init__(self, power=2, bias=False, columns=48):
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.ones(columns)), 1e-6, power
        if bias:
            self.bias = nn.Parameter(torch.zeros(columns))

    def forward(self, x):
        return x / (x.abs().pow(self.power).mean(-1, keepdim=True) + self.eps) * self.weight


class Grouped(nn.Module):
    """One of a class with and without groups, as Qwen4-Exp's."""

    def __init__(self, columns=64, groups=None):
        super().__init__()
        self.weight, self.eps, self.groups = nn.Parameter(torch.ones(columns)), 1e-6, groups

    def forward(self, x):
        wide = x.float().unflatten(-1, (self.groups or 1, -1))
        y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return (y * self.weight.float()).type_as(x)


@pytest.mark.parametrize("groups", [(None, 4), (4, None), (None, 64)])
def test_attributes_count(groups):
    norms = nn.ModuleList(Grouped(groups=count) for count in groups)
    norm.fuse_norms(norms)
    assert [isinstance(each, norm.FusedNorm) for each in norms] == [count is None for count in groups]


class HalfOtherwise(Scaled):
    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return y.to(x.dtype) * (2 if x.dtype == torch.float16 else 1)


def test_an_eps_that_is_no_number_any_more_is_the_classes_own_affair(monkeypatch):
    own = made("llama.LlamaRMSNorm")
    norm.fuse_norms(nn.ModuleList([own]))
    own.variance_epsilon = 0
    monkeypatch.setattr(norm.direct, "has_rms_norm", lambda x: True)
    monkeypatch.setattr(norm.direct, "rms_norm", None)  # is not called
    x = torch.randn(2, 48).bfloat16()
    assert torch.equal(own(x), ops.rms_norm(x, own.weight, 0.0))


def test_forward_looks_like_the_classes_own():
    """The kernels package compares the numbers of parameters."""
    own = made("llama.LlamaRMSNorm")
    norm.fuse_norms(nn.ModuleList([own]))
    assert str(inspect.signature(type(own).forward)).count(",") == 1


class Refuses(Scaled):
    def forward(self, x):
        raise RuntimeError("not so small")


class TakesMore(Scaled):
    def forward(self, x, gate=None):
        return x


def test_other_modules_stay():
    others = nn.ModuleList(
        [
            Scaled(),
            Scaled(bias=True),
            Refuses(),
            TakesMore(),
            HalfOtherwise(),
            nn.LayerNorm(48),
            nn.RMSNorm(48),
            nn.PReLU(48),
        ]
    )
    patched = made("llama.LlamaRMSNorm")
    patched.forward = lambda x: x
    others.append(patched)
    before = [type(other) for other in others]
    norm.fuse_norms(others)
    assert [type(other) for other in others] == before


def test_a_quantized_model_has_them_and_gives_them_back():
    model = build("qwen3_next", torch.float32)
    own = {name: type(module) for name, module in model.named_modules() if "Norm" in type(module).__name__}
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))
    fused = {name for name, module in model.named_modules() if isinstance(module, norm.FusedNorm)}
    assert fused == {name for name, kind in own.items() if "Gated" not in kind.__name__}
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert {type(module) for name, module in again.named_modules() if name in fused} == {
        type(model.get_submodule(name)) for name in fused
    }
    assert all(isinstance(model.get_submodule(name), own[name]) for name in fused)
    kbit.dequantize_model(model)
    assert {name: type(model.get_submodule(name)) for name in own} == own


def test_random_numbers_of_others_are_left_alone():
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    norm._kind(Scaled())
    assert torch.equal(torch.rand(3), want)


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "columns", [1, 8, 17, 128, 256, 264, 576, 2048, 4096, 5120, 8192, 8200, 16384, 16392]
)
def test_the_kernel_gives_the_definition(columns, dtype):
    for rows, order in zip((1, 3, 8, 129, 1000), [*ORDERS, ORDERS[0]], strict=True):
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        weight = torch.randn(columns, device="cuda").to(dtype)
        y = ops.rms_norm(x, weight, 1e-6, *order)
        require_norm(y, x, weight, 1e-6, order[0])
        added = torch.randn_like(x)
        total, of_sum = ops.add_rms_norm(x - added, added, weight, 1e-6, *order)
        assert torch.equal(total, (x - added) + added)
        assert torch.equal(of_sum, ops.rms_norm(total, weight, 1e-6, *order))
        assert all(torch.equal(ops.rms_norm(x, weight, 1e-6, *order), y) for _ in range(3))
        # A row's result is its own where the kernel takes it; float32 and wider rows are PyTorch's.
        last = x[-1:]
        assert not kernel.takes(last, weight) or torch.equal(ops.rms_norm(last, weight, 1e-6, *order), y[-1:])


@gpu
@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize("tokens", [3, 2048])
def test_heads_of_a_projection_are_read_in_their_places(columns, tokens):
    projected = torch.randn(2, tokens, 20 * columns, device="cuda").bfloat16()
    weight = torch.randn(columns, device="cuda").bfloat16()
    for part in (projected[..., : 16 * columns], projected[..., 16 * columns :]):
        heads = part.unflatten(-1, (-1, columns))
        for x in (heads, heads[..., ::2, :], heads.transpose(1, 2)):
            want = ops.rms_norm(x.contiguous(), weight, 1e-6)
            for _ in range(20):
                assert torch.equal(ops.rms_norm(x, weight, 1e-6), want)
            require_norm(want, x, weight, 1e-6, False)


@gpu
@pytest.mark.parametrize("name", CLASSES)
def test_norms_run_by_it(name, monkeypatch):
    own = made(name, 2048, device="cuda")
    x = torch.randn(2, 3, 2048, device="cuda", dtype=torch.bfloat16)
    launches = []
    run = cuda.rms_norm
    monkeypatch.setattr(cuda, "rms_norm", lambda *given: launches.append(1) or run(*given))
    with torch.no_grad():
        want = own(x)
        norm.fuse_norms(nn.ModuleList([own]))
        for given in (x, x.transpose(0, 1), x[:, :0]):
            expected = type(own).own.forward(own, given)
            have = own(given)
            assert have.shape == expected.shape
            torch.testing.assert_close(have, expected, rtol=2**-7, atol=0)
        assert len(launches) == 2
        assert (own(x) != want).sum() <= x.numel() // 100  # sums have another order
        launches.clear()
        with torch.autocast("cuda", dtype=torch.float16):
            assert torch.equal(own(x), want)
        with torch.profiler.profile():
            own(x)
        assert len(launches) == 1
        assert own(x.float()).dtype == torch.float32
        compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), want)
        assert len(launches) == 1
    own(x.clone().requires_grad_()).sum().backward()
    assert own.weight.grad is not None
    assert len(launches) == 1


@gpu
def test_the_reference_answers_where_it_is_forced(monkeypatch):
    x, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in ((4, 512), (512,)))
    want = torch.empty_like(x)
    reference.rms_norm(x, weight, 1e-6, False, True, want)
    monkeypatch.setenv("KBIT_BACKEND", "reference")
    assert torch.equal(ops.rms_norm(x, weight, 1e-6), want)
    monkeypatch.setenv("KBIT_BACKEND", "cuda")
    monkeypatch.setattr(reference, "rms_norm", None)
    require_norm(ops.rms_norm(x, weight, 1e-6), x, weight, 1e-6, False)


@gpu
def test_a_graph_records_it():
    x, weight = (torch.randn(shape, device="cuda").bfloat16() for shape in ((4, 512), (512,)))
    ops.rms_norm(x, weight, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.rms_norm(x, weight, 1e-6)
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(y, ops.rms_norm(x, weight, 1e-6))
