"""Gradients in x (and in the bias) of the training ops, so that adapters can train on quantized weights.

Codes, scales and codebook are constants: they get no gradient.
"""

from __future__ import annotations

import torch

from kbit.ops.schemas import LIBRARY


def _save_linear(ctx, inputs, output) -> None:
    _, *weight, bias, in_features = inputs
    ctx.save_for_backward(*weight)
    ctx.in_features = in_features
    ctx.has_bias = bias is not None


def _linear_backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.kbit.linear_grad_input(grad, *ctx.saved_tensors, ctx.in_features)
    if ctx.has_bias and ctx.needs_input_grad[5]:
        grad_bias = grad.flatten(0, -2).sum(0) if grad.dim() > 1 else grad
    return grad_x, None, None, None, None, grad_bias, None


def _save_grouped(ctx, inputs, output) -> None:
    _, *weight, in_features = inputs
    ctx.save_for_backward(*weight)
    ctx.in_features = in_features


def _grouped_backward(ctx, grad):
    grad_x = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.kbit.grouped_linear_grad_input(grad, *ctx.saved_tensors, ctx.in_features)
    return grad_x, None, None, None, None, None, None


torch.library.register_autograd(
    "kbit::linear_train", _linear_backward, setup_context=_save_linear, lib=LIBRARY
)
torch.library.register_autograd(
    "kbit::grouped_linear_train", _grouped_backward, setup_context=_save_grouped, lib=LIBRARY
)
