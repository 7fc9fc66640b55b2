"""A layer's way past the dispatcher: taken where nothing listens, and the same product."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import kbit
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


def test_nothing_on_a_cpu_goes_past_the_dispatcher():
    layer = KbitLinear.from_linear(torch.nn.Linear(64, 32), bits=4)
    with torch.no_grad(), Listening() as listening:
        layer(torch.zeros(1, 64))
    assert any("kbit" in name for name in listening.names)
    tiled = kbit.quantize(torch.zeros(32, 64)).tile().tiled
    parts = (layer.codebook, layer.weight_scale, None, 32, 64)
    assert direct.linear(torch.zeros(1, 64, dtype=torch.float16), tiled, *parts) is None


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
    calls = []
    monkeypatch.setattr(
        direct, "_multiply", lambda *args, run=direct._multiply: calls.append(1) or run(*args)
    )
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
    calls, run = [], direct._multiply
    monkeypatch.setattr(direct, "_multiply", lambda *args: calls.append(1) or run(*args))
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
    monkeypatch.setattr(direct, "_multiply", lambda *args: pytest.fail("went past the op"))
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
