"""A layer's way past the dispatcher: taken where nothing listens, and the same product."""

from __future__ import annotations

import os

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kbit
from kbit.backends import environment
from kbit.nn import KbitLinear
from kbit.ops import direct


class Listening(TorchDispatchMode):
    """Notes the names of ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_plain_is_what_nothing_listens_to():
    x = torch.zeros(2, 3)
    seen = []

    def ask(tensor):
        seen.append(direct._plain(tensor))
        return tensor + 1

    ask(x)
    ask(torch.nn.Parameter(x))
    with Listening():
        ask(x)
    with Watching():
        ask(x)
    torch.func.vmap(ask)(x)
    torch.func.grad(lambda one: ask(one).sum())(x)
    torch.jit.trace(ask, x, check_trace=False)
    assert seen == [True, *[False] * 6]
    assert torch.compile(lambda one: one + direct._plain(one), backend="eager")(x).sum() == 0


def counting(monkeypatch, device):
    """The calls that go past the dispatcher from now on."""
    calls, way = [], direct.ways[device]

    def multiply(*arguments):
        calls.append(1)
        return way.multiply(*arguments)

    monkeypatch.setitem(direct.ways, device, way._replace(multiply=multiply))
    return calls


def on_cpu(dtype=torch.float32, bias=True, absmax="e4m4"):
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40, bias=bias, dtype=dtype)
    return KbitLinear.from_linear(linear, bits=4, absmax_format=absmax).eval()


@pytest.mark.parametrize("absmax", ["e4m4", "float16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(96,), (1, 96), (3, 5, 96), (0, 96), (300, 96)])
def test_the_same_bits_as_the_op_on_a_cpu(dtype, shape, absmax, monkeypatch):
    calls = counting(monkeypatch, "cpu")
    for layer in (on_cpu(dtype, absmax=absmax), on_cpu(dtype, bias=False, absmax=absmax)):
        x = torch.randn(shape, dtype=dtype)
        with torch.no_grad():
            y = layer(x)
            with Listening() as listening:
                expected = layer(x)
        assert "kbit.linear.default" in listening.names
        assert y.shape == expected.shape
        assert torch.equal(y, expected)
    assert calls == [1, 1]


def test_strided_operands_on_a_cpu(monkeypatch):
    calls = counting(monkeypatch, "cpu")
    layer = on_cpu()
    layer.bias = torch.nn.Parameter(torch.randn(3 * 40)[::3])
    x = torch.randn(96, 5).t()
    with torch.no_grad():
        for rows in (x, x[1::2]):
            y = layer(rows)
            with Listening():
                assert torch.equal(y, layer(rows))
    assert len(calls) == 2


def test_parts_that_somebody_changed_go_to_the_op_on_a_cpu(monkeypatch):
    x, other = torch.randn(2, 96), kbit.quantize(torch.randn(72, 96), 4)
    calls = counting(monkeypatch, "cpu")
    with torch.no_grad():
        layer = on_cpu(bias=False)
        layer.out_features = 8
        assert layer(x).shape == (2, 40)
        for shorter in (slice(0, 40), slice(0, 72)):
            layer = on_cpu(bias=False)
            layer.weight_packed = torch.nn.Parameter(other.packed[shorter], requires_grad=False)
            layer.weight_absmax = torch.nn.Parameter(other.absmax[:72], requires_grad=False)
            if shorter.stop == 72:
                assert layer(x).shape == (2, 72)
            else:
                with pytest.raises(ValueError, match="do not belong to one weight"):
                    layer(x)
        layer = on_cpu(bias=False)
        layer.codebook.data = layer.codebook.data.half()
        with pytest.raises(TypeError, match="codebook must be float32"):
            layer(x)
        for wrong in (torch.ones(24), torch.ones(4, 4)):
            layer = on_cpu(bias=False)
            layer.codebook = wrong
            with pytest.raises(ValueError, match="levels"):
                layer(x)
        layer = on_cpu(bias=False)
        layer.weight_scale = torch.ones(5)
        with pytest.raises(ValueError, match="do not belong to one weight"):
            layer(x)
        layer = on_cpu(bias=False)
        layer.codebook = torch._neg_view(layer.codebook)
        assert torch.equal(layer(x), -on_cpu(bias=False)(x))
        calls.clear()
        layer = on_cpu()
        layer.bias.data = torch._neg_view(layer.bias.data)
        assert torch.equal(layer(x), on_cpu(bias=False)(x) + layer.bias.resolve_neg())
    assert calls == [1]


def test_what_the_op_has_to_do_more_for_goes_to_it_on_a_cpu(monkeypatch):
    calls = counting(monkeypatch, "cpu")
    layer = on_cpu()
    x = torch.randn(2, 96)
    layer(x.clone().requires_grad_()).sum().backward()
    with torch.no_grad():
        layer(x.half())  # a bias of another dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(x)
        with torch.profiler.profile():
            layer(x)
        assert torch.equal(layer(torch._neg_view(x)), layer(torch._neg_view(x).resolve_neg()))
        assert torch.equal(layer(torch._efficientzerotensor(2, 96)), layer(torch.zeros(2, 96)))
        assert len(calls) == 2
        calls.clear()
        for wrong in (x[:, :64], x.long(), x.double(), x.to_sparse(), x.to_mkldnn(), NESTED):
            with pytest.raises((TypeError, ValueError)):
                layer(wrong)
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="float64"):
            layer(x.double())  # which autocast leaves as they are
        layer.bias = torch.nn.Parameter(layer.bias[:7])
        with pytest.raises(ValueError, match="bias"):
            layer(x)
        layer.bias = None
        layer.weight_packed = Subclass(layer.weight_packed, requires_grad=False)
        layer(x)
    assert calls == []


NESTED = torch.nested.as_nested_tensor([torch.zeros(2, 96), torch.zeros(1, 96)])


class Subclass(torch.nn.Parameter):
    pass


def test_tiles_on_a_cpu_go_to_the_op():
    q = kbit.quantize(torch.zeros(32, 64)).tile()
    x = torch.zeros(1, 64, dtype=torch.float16)
    assert direct.linear(x, (q.tiled, q.codebook, q.scale), None, 32, 64) is None


@pytest.mark.parametrize(
    ("name", "read"), [("KBIT_KERNEL", environment.kernel), ("KBIT_BACKEND", environment.backend)]
)
def test_what_is_forced_is_looked_up_at_every_call(name, read, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert read() is None
    for value in ("stream", "größer"):
        monkeypatch.setenv(name, value)
        assert read() == os.environ[name] == value
    monkeypatch.setenv(name, "")
    assert read() is None
    monkeypatch.setenv(name, "cpu")
    monkeypatch.delenv(name)
    assert read() is None


def on_gpu(dtype=torch.bfloat16, bias=True):
    torch.manual_seed(0)
    linear = torch.nn.Linear(512, 384, bias=bias, device="cuda", dtype=dtype)
    return KbitLinear.from_linear(linear, bits=4).eval()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(512,), (1, 512), (1, 1, 512), (3, 5, 512), (40, 512), (300, 512)])
def test_the_same_bits_as_the_op(dtype, shape, monkeypatch):
    layer = on_gpu(dtype)
    x = torch.randn(shape, device="cuda", dtype=dtype)
    calls = counting(monkeypatch, "cuda")
    with torch.no_grad():
        y = layer(x)
        assert calls == [1]
        with Listening() as listening:
            expected = layer(x)
    assert "kbit.linear_tiled.default" in listening.names
    assert calls == [1]
    assert y.shape == expected.shape
    assert torch.equal(y, expected)


@pytest.mark.gpu
def test_strided_and_empty_operands(monkeypatch):
    calls = counting(monkeypatch, "cuda")
    layer = on_gpu()
    layer.bias = torch.nn.Parameter(torch.randn(3 * 384, device="cuda", dtype=torch.bfloat16)[::3])
    x = torch.randn(512, 5, device="cuda", dtype=torch.bfloat16).t()
    with torch.no_grad():
        for rows in (x, x[:0], x[1::2]):
            y = layer(rows)
            with Listening():
                assert torch.equal(y, layer(rows))
    assert len(calls) == 3


@pytest.mark.gpu
def test_what_the_op_has_to_do_more_for_goes_to_it(monkeypatch):
    calls = counting(monkeypatch, "cuda")
    layer = on_gpu()
    x = torch.randn(2, 512, device="cuda", dtype=torch.bfloat16)
    layer(x.clone().requires_grad_()).sum().backward()
    with torch.no_grad():
        layer(x.float())
        layer(x.half())  # a bias of another dtype
        with torch.autocast("cuda", dtype=torch.bfloat16):
            layer(x)
        with torch.profiler.profile():
            layer(x)
        for wrong in (x[:, :480], x.cpu(), x.long()):
            with pytest.raises((TypeError, ValueError)):
                layer(wrong)
        layer.bias = torch.nn.Parameter(layer.bias[:100])
        with pytest.raises(ValueError, match="bias"):
            layer(x)
    assert calls == []


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_tiles_have_the_shape_of_their_weight(bits):
    q = kbit.quantize(torch.randn(40, 100), bits)
    q.tile()
    parts, holds = (q.tiled, q.codebook, q.scale), direct.ways["cuda"].holds
    assert holds(parts, 40, 100)
    assert not holds(parts, 49, 100)
    assert not holds(parts, 40, 129)
    assert not holds((q.tiled[1:], *parts[1:]), 40, 100)
    assert not holds((q.tiled, torch.ones(8 if bits == 4 else 16), q.scale), 40, 100)
