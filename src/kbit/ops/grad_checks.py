"""Argument checks of the ops that compute gradients in x; the same eager and traced."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from kbit.format.part_checks import check_parts, check_tiles
from kbit.format.words import at
from kbit.ops import checks


def wants_grad(*inputs: torch.Tensor | None) -> bool:
    """Whether one of `inputs` is to be differentiated; in vmap, what is behind it, as it says no itself."""
    if not torch.is_grad_enabled():
        return False
    if any(one is not None and one.requires_grad for one in inputs):
        return True
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return any(one is not None and _unbatched(one).requires_grad for one in inputs)


def is_batched(one: torch.Tensor) -> bool:
    """Whether a tensor is one of torch.vmap's, which ops without a rule for it cannot take."""
    transforms = torch._C._functorch
    while transforms.is_functorch_wrapped_tensor(one):
        if transforms.is_batchedtensor(one):
            return True
        one = transforms.get_unwrapped(one)
    return False


def _unbatched(one: torch.Tensor) -> torch.Tensor:
    transforms = torch._C._functorch
    while transforms.is_batchedtensor(one):
        one = transforms.get_unwrapped(one)
    return one


_BACKWARDS = "Differentiate backwards, with torch.autograd.grad"
_BY_AUTOGRAD = "Use torch.autograd.grad; torch.func.vmap works"


def no_tangent(op: str, where: str, *inputs: torch.Tensor | None, remedy: str = _BACKWARDS) -> None:
    """Raise NotImplementedError if one of `inputs` has a forward-mode tangent, which ops would ignore."""
    # The level is -1 outside dual_level and torch.func.jvp; nothing public says so as quickly.
    if forward_ad._current_level < 0:
        return
    duals = [forward_ad.unpack_dual(_unbatched(one)) for one in inputs if one is not None]
    if any(dual.tangent is not None for dual in duals):
        raise NotImplementedError(
            f"{op}: has no forward-mode derivative, got an input with a tangent{at(where)}. {remedy}."
        )


def no_transform(op: str, where: str, remedy: str = _BY_AUTOGRAD) -> None:
    """Raise NotImplementedError inside torch.func.grad, vjp or jacrev; asked where gradients are wanted."""
    # Nothing public says so; while torch.compile traces, torch's own error is left.
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    transforms = torch._C._functorch
    if any(one.key() == transforms.TransformType.Grad for one in transforms.get_interpreter_stack() or ()):
        raise NotImplementedError(
            f"{op}: torch.func.grad, vjp and jacrev cannot differentiate it, got an input of "
            f"theirs{at(where)}. {remedy}."
        )


def in_transform() -> bool:
    """Whether forward-mode differentiation or a transform of torch.func is under way; no while traced.

    Ops have no formulas for them: what can do without one asks this first.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def canonical(
    grad: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    expert_offsets: torch.Tensor | None = None,
) -> None:
    """Check the arguments of the grad_input ops on canonical weights.

    Raises:
        TypeError, ValueError: see `check_parts`; also what does not fit the weight.
    """
    check_parts(packed, absmax, codebook, scale, in_features)
    _product((*packed.shape[:-1], in_features), grad, packed.device, expert_offsets)


def tiled(
    grad: torch.Tensor,
    tiles: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    out_features: int,
    in_features: int,
    expert_offsets: torch.Tensor | None = None,
) -> None:
    """Check the arguments of the grad_input ops on tiles.

    Raises:
        TypeError, ValueError: see `check_tiles`; also what does not fit the weight.
    """
    check_tiles(tiles, codebook, scale, out_features, in_features)
    _product((*tiles.shape[:-3], out_features, in_features), grad, tiles.device, expert_offsets)


def _product(
    shape: tuple[int, ...], grad: torch.Tensor, device: torch.device, expert_offsets: torch.Tensor | None
) -> None:
    """Check a product's gradient against its weight: grad is [..., N], or [T, N] with experts' offsets.

    Raises:
        TypeError: grad is not float, or offsets are not int32.
        ValueError: shapes or devices do not belong together.
    """
    grouped = expert_offsets is not None
    op = "backward of grouped_linear" if grouped else "backward of linear"
    checks.activation(op, grad, shape[-2], device)
    if len(shape) != 2 + grouped or (grouped and grad.dim() != 2):
        raise ValueError(
            f"{op}: it takes weight {'[E, N, K] and gradient [T, N]' if grouped else '[N, K]'}, got weight "
            f"{tuple(shape)} and gradient {tuple(grad.shape)}. Use the op of the other product."
        )
    if expert_offsets is not None:
        checks.offsets(op, expert_offsets, shape[0], device)
