"""Layers without a gradient, W4A4 ones and experts: who asks for one is told so."""

from __future__ import annotations

from typing import Any

import torch

from kbit.format.words import at
from kbit.ops import grad_checks


def no_transform_of_codes(where: str, *inputs: torch.Tensor) -> None:
    """Raise NotImplementedError if an input is differentiated forwards, or by torch.func."""
    grad_checks.no_tangent("NVFP4", where, *inputs)
    grad_checks.no_transform("NVFP4", where)


def without_gradient(y: torch.Tensor, where: str, *inputs: torch.Tensor) -> torch.Tensor:
    """`y`, computed without autograd, such that backward() through it raises NotImplementedError.

    What torch.compile traces is left alone: it traces the backward at once.

    Args:
        y: the result.
        where: name of the layer, for the message.
        inputs: what it was computed from; only those that require a gradient count.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return y
    wanted = [one for one in inputs if one.requires_grad]
    return _WithoutGradient.apply(y, where, *wanted) if wanted else y


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, where: str, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.where = where
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(
            f"NVFP4: there is no gradient of quantized activations or of experts{at(ctx.where)}. Linear "
            f"layers with activations='16bit' have one."
        )
