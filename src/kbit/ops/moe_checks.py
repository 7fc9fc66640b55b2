"""Argument checks of the routing ops; like `kbit.ops.checks`, the same eager and traced."""

from __future__ import annotations

import torch

from kbit.format import type_checks
from kbit.format.words import at
from kbit.ops import checks

# Slots are int32, and so are the sums that lead to them.
MAX_CHOICES = 2**30
SCORINGS = ("softmax", "sigmoid")
# What the weight of a shared expert is; "": there is none. A kernel takes the place in this list.
SHARED = ("", "sigmoid", "one")


def moe_logits(
    x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None, last: torch.Tensor | None
) -> None:
    """Check the arguments of `kbit::moe_logits`.

    Raises:
        TypeError: x is not float, a weight is of another dtype and not float32, or dtype is neither theirs
            nor float32.
        ValueError: shapes or devices do not belong together.
    """
    checks.float_dtype("moe_logits", "x", x.dtype)
    wanted = dict.fromkeys((x.dtype, torch.float32))
    if weight.dtype not in wanted:
        raise TypeError(
            f"moe_logits: weight must be {' or '.join(map(str, wanted))} beside x in {x.dtype}, got "
            f"{weight.dtype}. Cast one of them."
        )
    if (dtype or x.dtype) not in (weight.dtype, torch.float32):
        raise TypeError(
            f"moe_logits: dtype must be torch.float32, or that of x and weight; got {dtype} for x in "
            f"{x.dtype} and a weight in {weight.dtype}."
        )
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or x.device != weight.device:
        raise ValueError(
            f"moe_logits: x must be [T, K] and weight [E, K] on one device, got {tuple(x.shape)} on "
            f"{x.device} and {tuple(weight.shape)} on {weight.device}."
        )
    if last is None:
        return
    if last.dtype != weight.dtype:
        raise TypeError(
            f"moe_logits: last must be {weight.dtype} like weight, got {last.dtype}. Cast one of them."
        )
    if last.shape != (1, x.shape[1]) or last.device != x.device:
        raise ValueError(
            f"moe_logits: last must be [1, {x.shape[1]}] on {x.device}, got {tuple(last.shape)} on "
            f"{last.device}. It is one row of a weight."
        )


def moe_route(logits: torch.Tensor, top_k: int, scoring: str, bias: torch.Tensor | None, shared: str) -> None:
    """Check the arguments of `kbit::moe_route`.

    Raises:
        TypeError: logits are not float, or bias is not float32.
        ValueError: another scoring or weight of a shared expert, a number of choices that the experts do not
            have, or shapes or devices that do not belong together.
    """
    checks.float_dtype("moe_route", "logits", logits.dtype)
    if scoring not in SCORINGS:
        raise ValueError(
            f"moe_route: scoring must be one of {', '.join(SCORINGS)}, got {scoring!r}. "
            f"Take the one of the model's router."
        )
    if shared not in SHARED:
        raise ValueError(
            f"moe_route: shared must be one of {SHARED}, got {shared!r}. Leave it out if no expert is shared."
        )
    if logits.dim() != 2:
        raise ValueError(f"moe_route: logits must be [T, E], got {tuple(logits.shape)}. Flatten tokens.")
    experts = logits.shape[1] - (shared == "sigmoid")
    if not 1 <= top_k <= experts:
        raise ValueError(
            f"moe_route: top_k must be in 1..{experts}, the number of experts, got {top_k}. Is it that of "
            f"another model?"
        )
    if bias is None:
        return
    if bias.dtype != torch.float32:
        raise TypeError(f"moe_route: bias must be float32, got {bias.dtype}. Use bias.float().")
    if bias.shape != (experts,) or bias.device != logits.device:
        raise ValueError(
            f"moe_route: bias must be [{experts}] on {logits.device}, got {tuple(bias.shape)} on "
            f"{bias.device}. It has one number for each expert."
        )


def moe_align(ids: torch.Tensor, num_experts: int, where: str = "") -> None:
    """Check the arguments of `kbit::moe_align`.

    Args:
        ids, num_experts: the op's.
        where: name of the layer, for the message.

    Raises:
        TypeError: ids are not int32 or int64.
        ValueError: ids are not [T, U], or there is no expert, or more than int32 counts.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"moe_align: ids must be int32 or int64, got {ids.dtype}{at(where)}. Use .int().")
    if ids.dim() != 2 or ids.numel() > MAX_CHOICES:
        raise ValueError(
            f"moe_align: ids must be [tokens, choices] with at most {MAX_CHOICES} of them, got "
            f"{tuple(ids.shape)}{at(where)}. Reshape them, or split the batch."
        )
    if not 1 <= num_experts <= MAX_CHOICES:
        raise ValueError(
            f"moe_align: num_experts must be in 1..{MAX_CHOICES}, got {num_experts}{at(where)}. Pass the "
            f"layer's own."
        )


def routing(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, where: str = "") -> None:
    """Check that ids and weights [T, U] are the choices of x [T, K]: kernels read the rows that they count.

    Args:
        x, ids, weights: rows, the experts of each, and their weights.
        where: name of the layer, for the message.

    Raises:
        TypeError: one is no dense tensor, or ids are no integers.
        ValueError: shapes do not belong together.
    """
    for name, value in (("hidden_states", x), ("top_k_index", ids), ("top_k_weights", weights)):
        type_checks.tensor("experts", name, value, where)
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"experts: hidden_states must be [T, K], top_k_index and top_k_weights [T, choices], got "
            f"{tuple(x.shape)}, {tuple(ids.shape)} and {tuple(weights.shape)}{at(where)}. Flatten "
            f"tokens, and pass the choices of the same ones."
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"experts: top_k_index must be int32 or int64, got {ids.dtype}{at(where)}. Is it in the place of "
            f"top_k_weights?"
        )


def moe_combine(
    y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor | None
) -> tuple[int, int]:
    """Check the arguments of `kbit::moe_combine`; the result's shape.

    Raises:
        TypeError: y or weights are not float, or inverse or bounds are not int32.
        ValueError: shapes or devices do not belong together.
    """
    checks.float_dtype("moe_combine", "y", y.dtype)
    checks.float_dtype("moe_combine", "weights", weights.dtype)
    if inverse.dtype != torch.int32 or (bounds is not None and bounds.dtype != torch.int32):
        found = inverse.dtype if bounds is None else f"{inverse.dtype} and {bounds.dtype}"
        raise TypeError(f"moe_combine: inverse and bounds must be int32, got {found}. moe_align makes them.")
    if y.dim() != 2 or inverse.dim() != 2 or weights.shape != inverse.shape:
        raise ValueError(
            f"moe_combine: y must be [R, H], inverse and weights [T, U], got {tuple(y.shape)}, "
            f"{tuple(inverse.shape)} and {tuple(weights.shape)}. Are the weights those of other tokens?"
        )
    if bounds is not None and (bounds.dim() != 1 or bounds.shape[0] < 2):
        raise ValueError(
            f"moe_combine: bounds must be [experts + 1], got {tuple(bounds.shape)}. moe_align makes them."
        )
    for name, tensor in (("inverse", inverse), ("weights", weights), ("bounds", bounds)):
        if tensor is not None and tensor.device != y.device:
            raise ValueError(
                f"moe_combine: {name} is on {tensor.device}, y on {y.device}. Move them together."
            )
    return inverse.shape[0], y.shape[1]
