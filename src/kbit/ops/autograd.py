"""Gradients in x (and in the bias) of the training ops, so that adapters can train on quantized weights.

Codes, scales and codebook are constants: they get no gradient. A gradient in x is a product with the weight
too; where it is to be differentiated again, as penalties on gradients do, its own gradient is the first
product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kbit.ops import tiled_schemas  # noqa: F401  (its ops are differentiated here)
from kbit.ops.schemas import LIBRARY

# Inputs of a training op are x, the weight's tensors, bias or offsets, and sizes. The number of the weight's:
_CANONICAL, _TILED = 4, 3

Product = Callable[[torch.Tensor], torch.Tensor]


class _Differentiable(torch.autograd.Function):
    """compute(grad), whose gradient is derive(...)."""

    @staticmethod
    def forward(grad, compute, derive):
        return compute(grad)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.derive = inputs[2]

    @staticmethod
    def backward(ctx, grad):
        return ctx.derive(grad), None, None


def _grad_in_x(grad: torch.Tensor, compute: Product, derive: Product) -> torch.Tensor:
    # Registering this with the ops would cost every backward pass 14 us a layer.
    if torch.is_grad_enabled() and grad.requires_grad:
        return _Differentiable.apply(grad, compute, derive)
    return compute(grad)


def _register_linear(name: str, parts: int) -> None:
    """Autograd of `kbit::<name>_train`, whose weight is `parts` tensors."""
    train, grad_input = (getattr(torch.ops.kbit, name + end) for end in ("_train", "_grad_input"))

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1 : 1 + parts])
        ctx.sizes = inputs[2 + parts :]
        ctx.has_bias = inputs[1 + parts] is not None

    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight, sizes = ctx.saved_tensors, ctx.sizes
            grad_x = _grad_in_x(
                grad, lambda g: grad_input(g, *weight, *sizes), lambda g: train(g, *weight, None, *sizes)
            )
        if ctx.has_bias and ctx.needs_input_grad[1 + parts]:
            grad_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
        return grad_x, *[None] * parts, grad_bias, *[None] * len(ctx.sizes)

    torch.library.register_autograd(f"kbit::{name}_train", backward, setup_context=save, lib=LIBRARY)


def _register_grouped(name: str, parts: int) -> None:
    """Autograd of `kbit::<name>_train`, whose weight is `parts` tensors, followed by expert offsets."""
    train, grad_input = (getattr(torch.ops.kbit, name + end) for end in ("_train", "_grad_input"))

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1 : 2 + parts])
        ctx.sizes = inputs[2 + parts :]

    def backward(ctx, grad):
        grad_x = None
        if ctx.needs_input_grad[0]:
            rest = (*ctx.saved_tensors, *ctx.sizes)
            grad_x = _grad_in_x(grad, lambda g: grad_input(g, *rest), lambda g: train(g, *rest))
        return grad_x, *[None] * (1 + parts + len(ctx.sizes))

    torch.library.register_autograd(f"kbit::{name}_train", backward, setup_context=save, lib=LIBRARY)


_register_linear("linear", _CANONICAL)
_register_linear("linear_tiled", _TILED)
_register_grouped("grouped_linear", _CANONICAL)
_register_grouped("grouped_linear_tiled", _TILED)
