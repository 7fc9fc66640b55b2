"""KbitExperts: the fused experts of a mixture-of-experts layer on quantized weights."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from kbit.format.codebook import check_bits
from kbit.format.policy import QuantizationPolicy
from kbit.nn.merge import quantize_halves
from kbit.nn.parts import QuantizedModule
from kbit.ops import api

WEIGHTS = ("gate_up_proj", "down_proj")

# The layout that KbitExperts computes, as transformers' experts classes describe themselves.
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
    """Why `KbitExperts` cannot stand in for a module of fused experts, or None if it can."""
    for flag, wanted in _LAYOUT.items():
        if getattr(module, flag, wanted) != wanted:
            return f"its experts have {flag}={not wanted}"
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        return "its experts have a gate of their own"
    if list(inspect.signature(type(module).forward).parameters) != _ARGUMENTS:
        return f"its forward takes other arguments than {', '.join(_ARGUMENTS[1:])}"
    if not callable(getattr(module, "act_fn", None)):
        return "it has no act_fn"
    (experts, twice, hidden), down = (_weight(module, name).shape for name in WEIGHTS)
    if twice % 2 or down != (experts, hidden, twice // 2):
        return (
            f"gate_up_proj {(experts, twice, hidden)} and down_proj {down} are not [E, 2I, H] and [E, H, I]"
        )
    return None


def _weight(module: nn.Module, name: str) -> torch.Tensor:
    weight = module._parameters[name]
    assert weight is not None
    return weight


class KbitExperts(QuantizedModule):
    """Replaces transformers' fused experts (Qwen3MoeExperts and its likes), with the same call.

    Each token goes through its chosen experts: down(act(gate(x)) * up(x)), weighted and summed. Tokens are
    sorted by expert with a stable sort and the results are summed in the order of top_k_index, so equal
    inputs give equal bits. Nothing waits for the device.

    Attributes:
        num_experts, hidden_dim, intermediate_dim, act_fn: as in the replaced module.
    """

    # transformers' expert parallelism sets this; an id equal to num_experts then means "not mine".
    _is_expert_parallel = False

    config: Any = None

    def __init__(
        self,
        num_experts: int,
        hidden_dim: int,
        intermediate_dim: int,
        act_fn: Any,
        bits: int = 4,
        absmax_format: str = "e4m4",
        device: Any = None,
        name: str = "",
    ) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        self.act_fn = act_fn
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (num_experts, 2 * intermediate_dim, hidden_dim),
            "down_proj": (num_experts, hidden_dim, intermediate_dim),
        }
        self._init_parts(shapes, check_bits(bits), absmax_format, device, name)

    @classmethod
    def empty_like(
        cls, experts: nn.Module, bits: int, absmax_format: str, name: str = "", device: Any = None
    ) -> KbitExperts:
        """A module of the same shape with empty parts.

        Raises:
            ValueError: the experts are laid out in a way that this class does not compute.
        """
        reason = unsupported_experts(experts)
        if reason:
            raise ValueError(f"{name or type(experts).__name__}: cannot quantize these experts: {reason}.")
        gate_up = _weight(experts, "gate_up_proj")
        count, twice, hidden = gate_up.shape
        layer = cls(
            count, hidden, twice // 2, experts.act_fn, bits, absmax_format, device or gate_up.device, name
        )
        layer.config = getattr(experts, "config", None)
        layer.training = experts.training
        return layer

    @classmethod
    def from_experts(
        cls, experts: nn.Module, bits: int, policy: QuantizationPolicy, name: str = ""
    ) -> KbitExperts:
        """Quantize fused experts, gate and up separately, as their checkpoints store them.

        Raises:
            NonFiniteWeightError: a weight holds NaN or Inf.
            ValueError: the experts are laid out in a way that this class does not compute.
        """
        layer = cls.empty_like(experts, bits, policy.absmax_format, name, device="meta")
        codebook = policy.codebook_for(bits)
        settings = (bits, codebook, policy.absmax_format, policy.search)
        for weight, halves in (("gate_up_proj", 2), ("down_proj", 1)):
            source = _weight(experts, weight).detach()
            where = f"{name}.{weight}" if name else weight
            layer.fill(weight, quantize_halves(source, halves, *settings, where=where))
        return layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run every token through its experts.

        Args:
            hidden_states: [T, hidden_dim].
            top_k_index: int [T, k], expert ids; num_experts means an expert of another device.
            top_k_weights: [T, k].

        Returns:
            [T, hidden_dim] of hidden_states' dtype.
        """
        tokens, chosen = top_k_index.shape
        ids, order = torch.sort(top_k_index.flatten(), stable=True)
        # Where each expert's rows begin. Unlike bincount, searchsorted needs no look at the largest id, which
        # on a GPU would wait for it. Ids of num_experts sort behind the last offset and give rows of 0.
        boundaries = torch.arange(self.num_experts + 1, device=ids.device, dtype=ids.dtype)
        offsets = torch.searchsorted(ids, boundaries).int()

        rows = hidden_states[torch.div(order, chosen, rounding_mode="floor")]
        gate, up = self._grouped(rows, "gate_up_proj", offsets).chunk(2, dim=-1)
        results = self._grouped(self.act_fn(gate) * up, "down_proj", offsets)

        # Back to the order of top_k_index; a gather and a sum over k have one order, atomic adds have none.
        back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))
        weighted = results[back].view(tokens, chosen, -1).float() * top_k_weights.float().unsqueeze(-1)
        return weighted.sum(dim=1).to(hidden_states.dtype)

    def _grouped(self, x: torch.Tensor, name: str, offsets: torch.Tensor) -> torch.Tensor:
        packed, absmax = getattr(self, name + "_packed"), getattr(self, name + "_absmax")
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        op = torch.ops.kbit.grouped_linear_train if needs_grad else torch.ops.kbit.grouped_linear
        scale = getattr(self, name + "_scale")
        return op(x, packed, absmax, self.codebook, scale, offsets, self.shapes[name][-1])

    def dequantize(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A weight, "gate_up_proj" or "down_proj", decoded to [E, N, K] of `dtype`."""
        return api.dequantize(self.quantized(name), dtype)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"intermediate_dim={self.intermediate_dim}, {self._describe()}"
        )
