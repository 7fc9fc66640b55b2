"""Gradients in x (and in the bias) of the training ops, so that adapters can train on quantized weights.

Codes, scales and codebook are constants: they get no gradient.
"""

from __future__ import annotations

import torch

from kbit.ops import tiled_schemas  # noqa: F401  (its ops are differentiated here)
from kbit.ops.schemas import LIBRARY

# The inputs of a training op: x, the weight's tensors, bias or offsets, sizes. So many tensors a weight is:
_CANONICAL, _TILED = 4, 3


def _register_linear(name: str, parts: int) -> None:
    """Autograd of `kbit::<name>_train`, whose weight is `parts` tensors."""
    grad_input = getattr(torch.ops.kbit, f"{name}_grad_input")

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1 : 1 + parts])
        ctx.sizes = inputs[2 + parts :]
        ctx.has_bias = inputs[1 + parts] is not None

    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_input(grad, *ctx.saved_tensors, *ctx.sizes)
        if ctx.has_bias and ctx.needs_input_grad[1 + parts]:
            grad_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
        return grad_x, *[None] * parts, grad_bias, *[None] * len(ctx.sizes)

    torch.library.register_autograd(f"kbit::{name}_train", backward, setup_context=save, lib=LIBRARY)


def _register_grouped(name: str, parts: int) -> None:
    """Autograd of `kbit::<name>_train`, whose weight is `parts` tensors, followed by expert offsets."""
    grad_input = getattr(torch.ops.kbit, f"{name}_grad_input")

    def save(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs[1 : 2 + parts])
        ctx.sizes = inputs[2 + parts :]

    def backward(ctx, grad):
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad_input(grad, *ctx.saved_tensors, *ctx.sizes)
        return grad_x, *[None] * (1 + parts + len(ctx.sizes))

    torch.library.register_autograd(f"kbit::{name}_train", backward, setup_context=save, lib=LIBRARY)


_register_linear("linear", _CANONICAL)
_register_linear("linear_tiled", _TILED)
_register_grouped("grouped_linear", _CANONICAL)
_register_grouped("grouped_linear_tiled", _TILED)
