"""torch.vmap, and torch.func around it: gradients arrive, and where there are none it is said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kbit
from kbit.nn import KbitExperts, KbitLinear
from test_nn import Experts, routed

OFFSETS = torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32)


def linear(bias: bool = False):
    """A layer; its bias, if it has one, is not to be trained."""
    layer = KbitLinear.from_linear(nn.Linear(48, 40, bias=bias), 4, name="up")
    return layer.requires_grad_(False)


def experts():
    _, ids, weights = routed()
    layer = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy(), name="experts")
    return lambda x: layer(x, ids, weights)


def op():
    q = kbit.quantize(torch.randn(40, 48), 4, search=False)
    return lambda x: kbit.linear(x, q)


def op_of_experts():
    q = kbit.quantize(torch.randn(4, 40, 48), 4, search=False)
    return lambda x: kbit.grouped_linear(x[:5], q, OFFSETS)


CALLS = {
    "a layer": linear,
    "a layer with a bias": lambda: linear(bias=True),
    "experts": experts,
    "an op": op,
    "an op of experts": op_of_experts,
}


@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_gradients_arrive_through_vmap(made):
    call, x = made(), routed()[0]
    batch = torch.stack([x, 2 * x, -x]).requires_grad_()
    (found,) = torch.autograd.grad(torch.vmap(call)(batch).square().sum(), batch)
    one_by_one = torch.stack([call(one) for one in batch.unbind()])
    (wanted,) = torch.autograd.grad(one_by_one.square().sum(), batch)
    torch.testing.assert_close(found, wanted)
    assert wanted.abs().sum() > 0


@pytest.mark.parametrize("made", CALLS.values(), ids=CALLS)
def test_transforms_around_vmap_are_refused(made):
    call, batch = torch.vmap(made()), torch.stack([routed()[0]] * 2)
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad, vjp and jacrev cannot"):
        torch.func.grad(lambda x: call(x).sum())(batch)
    with pytest.raises(NotImplementedError, match="has no forward-mode derivative"):
        torch.func.jvp(call, (batch,), (batch,))
    with torch.no_grad():
        assert call(batch).shape[0] == 2


def test_vmap_in_vmap():
    layer, x = linear(), torch.randn(2, 3, 48, requires_grad=True)
    (found,) = torch.autograd.grad(torch.vmap(torch.vmap(layer))(x).sum(), x)
    (wanted,) = torch.autograd.grad(layer(x).sum(), x)
    torch.testing.assert_close(found, wanted)
