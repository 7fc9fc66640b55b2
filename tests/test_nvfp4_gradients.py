"""What of NVFP4 has no gradient says so, in every way that one can be asked for, and works afterwards."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kbit.nvfp4 import (
    gemm_nvfp4,
    quantize_nvfp4,
    rmsnorm,
    rmsnorm_quantize_nvfp4,
    silu_mul,
    silu_mul_quantize_nvfp4,
)
from kbit.nvfp4.layers import NVFP4Experts, NVFP4Linear, NVFP4Settings
from test_nvfp4_layers import Experts

NONE = pytest.raises(NotImplementedError, match="NVFP4: there is no gradient of quantized activations")
IDS = torch.tensor([[0, 1], [2, 1], [3, 0]])


def linear(activations: str) -> NVFP4Linear:
    return NVFP4Linear.from_linear(nn.Linear(48, 48, bias=False), NVFP4Settings(activations), "proj")


def experts(activations: str) -> NVFP4Experts:
    return NVFP4Experts.from_experts(Experts(), NVFP4Settings(activations), "experts")


def call_of(kind: str, activations: str) -> Callable[[torch.Tensor], torch.Tensor]:
    if kind == "linear":
        return linear(activations)
    layer, weights = experts(activations), torch.full((3, 2), 0.5)
    return lambda x: layer(x, IDS, weights)


WITHOUT = pytest.mark.parametrize(
    ("kind", "activations"), [("linear", "nvfp4"), ("experts", "nvfp4"), ("experts", "16bit")]
)


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_a_layer_works_after_a_transform(activations: str) -> None:
    layer, x = linear(activations), torch.randn(3, 48)
    for transform in (torch.func.grad, torch.func.jacrev, lambda f: torch.vmap(torch.func.grad(f))):
        try:
            transform(lambda x: layer(x).sum())(x)
        except NotImplementedError:
            assert activations == "nvfp4"
        y = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), y)


@WITHOUT
def test_compiled_it_is_said_too(kind: str, activations: str) -> None:
    call = call_of(kind, activations)
    x = torch.randn(3, 48, requires_grad=True)
    y = torch.compile(lambda x: x + call(2 * x), backend="eager")(x)
    assert torch.equal(y, x + call(2 * x))
    with NONE:
        y.sum().backward()


@WITHOUT
def test_vmap_is_refused(kind: str, activations: str) -> None:
    call, batch = call_of(kind, activations), torch.randn(2, 3, 48)
    with pytest.raises(NotImplementedError, match=r"torch\.vmap cannot batch it.*\((proj|experts)\)"):
        torch.vmap(call)(batch)
    wanted = torch.randn(3, 48, requires_grad=True)
    with NONE:
        torch.vmap(lambda one: one + call(wanted))(batch)
    y = call(wanted.detach())
    assert torch.equal(torch.vmap(lambda one: one + call(wanted.detach()))(batch), batch + y)


@WITHOUT
def test_what_is_not_differentiated_may_be_in_a_transform(kind: str, activations: str) -> None:
    """A teacher, say."""
    teacher, x = call_of(kind, activations), torch.randn(3, 48)

    def loss(w: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x)
        return (x @ w - target).square().sum() + (x @ w * teacher(x)).sum()

    w, y = torch.randn(48, 48), teacher(x)
    torch.testing.assert_close(torch.func.grad(loss)(w), x.T @ (2 * (x @ w - y) + y))


@WITHOUT
def test_what_comes_out_can_be_changed_in_place(kind: str, activations: str) -> None:
    call = call_of(kind, activations)
    x = torch.randn(3, 48, requires_grad=True)
    y = call(x)
    y += x
    y[0].zero_()
    torch.relu_(y)
    with NONE:
        y.sum().backward()


def test_no_gradient_of_an_activation_s_own_parameters() -> None:
    module = Experts()
    module.act_fn = nn.PReLU()
    layer = NVFP4Experts.from_experts(module, NVFP4Settings(), "experts")
    x = torch.randn(3, 48)
    with NONE:
        layer(x, IDS, torch.full((3, 2), 0.5)).sum().backward()


def test_gradients_end_where_values_are_quantized() -> None:
    x = torch.randn(4, 64, requires_grad=True)
    w = quantize_nvfp4(torch.randn(8, 64))
    for row_scale in (False, True):
        t = quantize_nvfp4(x, row_scale=row_scale)
        assert not gemm_nvfp4(t, w, out_dtype=torch.float32).requires_grad
        assert t.row_scale is None or not t.row_scale.requires_grad


def norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    return rmsnorm(x, torch.ones(64), 1e-6, residual)


def norm_and_codes(
    x: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    return rmsnorm_quantize_nvfp4(x, torch.ones(64), 1e-6, residual)[1:]


FOLDS = {
    "silu_mul": silu_mul,
    "rmsnorm": lambda x: norm(x)[0],
    "rmsnorm's sum": lambda x: norm(x, x)[1],
    "rmsnorm_quantize_nvfp4": lambda x: norm_and_codes(x)[0],
    "rmsnorm_quantize_nvfp4's sum": lambda x: norm_and_codes(x, x)[1],
}


@pytest.mark.parametrize("name", FOLDS)
def test_folds_have_no_gradient(name: str) -> None:
    fold, x = FOLDS[name], torch.randn(4, 64)
    op = name.removesuffix("'s sum")
    y = fold(x.clone().requires_grad_())
    assert torch.equal(y, fold(x))
    with pytest.raises(NotImplementedError, match=rf"^{op}: has no gradient\. Detach its inputs"):
        y.sum().backward()
    with pytest.raises(NotImplementedError, match=f"^{op}: torch"):
        torch.func.grad(lambda x: fold(x).sum())(x)
    with pytest.raises(NotImplementedError, match=f"^{op}: torch.vmap cannot"):
        torch.vmap(fold)(x[None])
    with torch.no_grad():
        assert not fold(x.clone().requires_grad_()).requires_grad


def test_folds_alone_are_refused_in_transforms() -> None:
    with pytest.raises(NotImplementedError, match="^silu_mul_quantize_nvfp4: torch"):
        torch.vmap(lambda x: silu_mul_quantize_nvfp4(x).codes)(torch.randn(1, 4, 64))


@pytest.mark.parametrize("fold", [norm, norm_and_codes])
def test_without_a_residual_a_norm_gives_back_its_input(fold: Callable) -> None:
    x = torch.randn(4, 64, requires_grad=True)
    h = fold(x)[1]
    (grad,) = torch.autograd.grad(h.sum(), x)
    assert h is x
    assert torch.equal(grad, torch.ones_like(x))


def test_a_gradient_of_16_bits_beside_it_arrives() -> None:
    layer, x = linear("16bit"), torch.randn(3, 48, requires_grad=True)
    (grad,) = torch.autograd.grad(F.relu_(layer(x)).sum(), x)
    assert grad.abs().sum() > 0
