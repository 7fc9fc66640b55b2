"""What has no gradient, W4A4 layers, experts and producer folds: who asks for one is told so."""

from __future__ import annotations

from typing import Any

import torch

from kbit.format.words import at
from kbit.ops import grad_checks

# In messages: layers, which are asked for gradients by whole models.
LAYERS = "NVFP4"
_OF_LAYERS = (
    "there is no gradient of quantized activations or of experts",
    "Linear layers with activations='16bit' have one",
)
_OF_FOLDS = "has no gradient", "Detach its inputs, or call it within torch.no_grad()"


def _words(op: str) -> tuple[str, str]:
    """What there is no gradient of, and what to do."""
    return _OF_LAYERS if op == LAYERS else _OF_FOLDS


def refuse_transforms(op: str, where: str, *inputs: torch.Tensor | None) -> None:
    """Raise NotImplementedError if an input is differentiated forwards or by torch.func, or is vmap's.

    Args:
        op: what is called, or LAYERS.
        where: name of the layer, for the message.
        inputs: what results are computed from.
    """
    _, remedy = _words(op)
    grad_checks.no_tangent(op, where, *inputs, remedy=remedy)
    if grad_checks.in_transform() and any(one is not None and grad_checks.is_batched(one) for one in inputs):
        raise NotImplementedError(
            f"{op}: torch.vmap cannot batch it, got an input of its{at(where)}. Call it with the batch as a "
            f"dimension of its input."
        )
    if grad_checks.wants_grad(*inputs):
        grad_checks.no_transform(op, where, remedy)


# Compiled, the graph is broken at what is computed here anyhow; traced, the refusal would vanish.
@torch.compiler.disable
def without_gradient(y: torch.Tensor, op: str, where: str, *inputs: torch.Tensor | None) -> torch.Tensor:
    """`y`, computed without autograd, such that backward() through it raises NotImplementedError.

    Args:
        y: the result, which nobody else holds.
        op: what was called, or LAYERS.
        where: name of the layer, for the message.
        inputs: what it was computed from; only those that require a gradient count.

    Raises:
        NotImplementedError: within a transform of torch.func an input requires a gradient.
    """
    if not grad_checks.wants_grad(*inputs):
        return y
    what, remedy = _words(op)
    message = f"{op}: {what}{at(where)}. {remedy}."
    if grad_checks.in_transform():  # which hides from autograd what is attached here
        raise NotImplementedError(message)
    wanted = [one for one in inputs if one is not None and one.requires_grad]
    result: torch.Tensor = _WithoutGradient.apply(y, message, *wanted)
    return result


class _WithoutGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, message: str, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.message = message
        ctx.mark_dirty(y)  # itself, not a view of it: views of functions cannot be changed in place
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise NotImplementedError(ctx.message)
