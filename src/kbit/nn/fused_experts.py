"""Modules of fused experts, as transformers has them: what they hold, and which ones can be replaced."""

from __future__ import annotations

import inspect

import torch
from torch import nn

# The weights of fused experts, and how many matrices each has above each other: gate and up.
WEIGHTS = {"gate_up_proj": 2, "down_proj": 1}

# The layout that `KbitExperts` computes, as transformers' experts classes describe themselves.
_LAYOUT = {
    "is_transposed": False,
    "has_bias": False,
    "is_concatenated": True,
    "has_gate": True,
    "has_post_expert_norm": False,
}
_ARGUMENTS = ["self", "hidden_states", "top_k_index", "top_k_weights"]


def is_experts(module: nn.Module) -> bool:
    """Whether `module` holds fused experts: 3-D parameters gate_up_proj and down_proj."""
    weights = [module._parameters.get(name) for name in WEIGHTS]
    return all(weight is not None and weight.dim() == 3 for weight in weights)


def unsupported_experts(module: nn.Module) -> str | None:
    """Why `kbit.nn.KbitExperts` cannot stand in for a module of fused experts, or None if it can."""
    if not is_experts(module):
        return "they have no 3-D weights gate_up_proj and down_proj, or are quantized already"
    for flag, wanted in _LAYOUT.items():
        if getattr(module, flag, wanted) != wanted:
            return f"its experts have {flag}={not wanted}"
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        return "its experts have a gate of their own"
    if list(inspect.signature(type(module).forward).parameters) != _ARGUMENTS:
        return f"its forward takes other arguments than {', '.join(_ARGUMENTS[1:])}"
    forwards = [kind for kind in type(module).__mro__ if "forward" in vars(kind) and kind is not nn.Module]
    if len(forwards) > 1:
        return f"its forward is not that of {forwards[1].__name__}"
    if not callable(getattr(module, "act_fn", None)):
        return "it has no act_fn"
    if not all(weight_of(module, name).numel() for name in WEIGHTS):
        return "its weights have no elements"
    (experts, twice, hidden), down = (weight_of(module, name).shape for name in WEIGHTS)
    if twice % 2 or down != (experts, hidden, twice // 2):
        return (
            f"gate_up_proj {(experts, twice, hidden)} and down_proj {down} are not [E, 2I, H] and [E, H, I]"
        )
    return None


def weight_of(module: nn.Module, name: str) -> torch.Tensor:
    """One of the weights of fused experts."""
    weight = module._parameters[name]
    assert weight is not None
    return weight
