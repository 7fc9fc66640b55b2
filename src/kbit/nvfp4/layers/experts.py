"""NVFP4Experts: the fused experts of a mixture-of-experts layer with NVFP4 weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.driver import DeviceLimits
from kbit.backends.cuda.nvfp4 import ahead
from kbit.nn.fused_experts import WEIGHTS
from kbit.nn.support import is_silu
from kbit.nvfp4 import no_gradient
from kbit.nvfp4.expert_products import expert_linear, expert_product
from kbit.nvfp4.folds import silu_mul, silu_mul_quantize_nvfp4
from kbit.nvfp4.layers.parts import NVFP4Module, NVFP4Settings, quantize_weight
from kbit.nvfp4.moe import ExpertInput, Routing, combine_sorted, quantize_for_experts, route
from kbit.nvfp4.quantize import quantize_nvfp4
from kbit.ops import checks, moe_checks


class NVFP4Experts(NVFP4Module):
    """Replaces transformers' fused experts (Qwen3MoeExperts and classes like it), with the same call.

    Not differentiable, not even under W4A16: no gradient reaches activations or routing weights.

    Attributes:
        num_experts, hidden_dim, intermediate_dim, act_fn: as in the replaced module.
    """

    # Not "gate_up_proj" and "down_proj": transformers would split parameters of these names on saving.
    WEIGHTS = ("gate_up", "down")

    def __init__(
        self, gate_up: tuple[int, ...], act_fn: Any, settings: NVFP4Settings, device: Any, name: str = ""
    ) -> None:
        super().__init__()
        self.num_experts, twice, self.hidden_dim = gate_up
        self.intermediate_dim, self.act_fn = twice // 2, act_fn
        down = (self.num_experts, self.hidden_dim, self.intermediate_dim)
        self._init_parts({"gate_up": tuple(gate_up), "down": down}, settings, device, name)

    @classmethod
    def empty_like(
        cls, experts: Any, settings: NVFP4Settings, name: str = "", device: Any = None
    ) -> NVFP4Experts:
        """A module of the same shape, its weights still empty."""
        weight = experts.gate_up_proj
        device = weight.device if device is None else device
        return cls(tuple(weight.shape), experts.act_fn, settings, device, name)

    @classmethod
    def from_experts(cls, experts: Any, settings: NVFP4Settings, name: str = "") -> NVFP4Experts:
        """Quantize fused experts.

        Raises:
            NonFiniteError: a weight holds NaN or Inf.
        """
        layer = cls.empty_like(experts, settings, name, device="meta")
        for mine, theirs in zip(cls.WEIGHTS, WEIGHTS, strict=True):
            weight = getattr(experts, theirs).detach()
            layer.fill(mine, quantize_weight(weight, settings, f"{name}.{theirs}" if name else theirs))
        return layer

    def kernels_ahead(
        self, tokens: Sequence[int], dtype: torch.dtype, device: DeviceLimits
    ) -> list[KernelSpec]:
        """See `kbit.nn.ahead.KnowsKernels`."""
        settings = self.settings
        fold = settings.fold and settings.activations == "nvfp4" and is_silu(self.act_fn)
        columns = self.hidden_dim, self.intermediate_dim
        return ahead.of_experts(self._arithmetic, fold, self.num_experts, columns, dtype, device)

    def _tiles_pay(self, device: torch.device) -> bool:
        columns = self.hidden_dim, self.intermediate_dim
        return super()._tiles_pay(device) and ahead.take_tiles(self.num_experts, columns, device)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run every token through its experts; the sum over experts is in the order of top_k_index.

        Args:
            hidden_states: [T, hidden_dim].
            top_k_index: int [T, U]; num_experts means an expert of another device.
            top_k_weights: [T, U].

        Returns:
            [T, hidden_dim] of hidden_states' dtype.

        Raises:
            NotImplementedError: it is to be differentiated in an argument: at once if forwards or by
                torch.func, else by backward(); or it is called in torch.vmap.
            TypeError, ValueError: an argument does not fit; the message names this layer.
        """
        moe_checks.routing(hidden_states, top_k_index, top_k_weights, self.layer_name)
        moe_checks.moe_align(top_k_index, self.num_experts, self.layer_name)
        device = self._device_of("gate_up")
        checks.activation("experts", hidden_states, self.hidden_dim, device, self.layer_name)
        inputs = [hidden_states, top_k_weights]
        if self.settings.activations == "nvfp4" and isinstance(self.act_fn, nn.Module):
            inputs += self.act_fn.parameters()
        no_gradient.refuse_transforms(no_gradient.LAYERS, self.layer_name, *inputs, top_k_index)
        y = self._summed(hidden_states.detach(), top_k_index, top_k_weights.detach().float())
        return no_gradient.without_gradient(y, no_gradient.LAYERS, self.layer_name, *inputs)

    def _summed(self, x: torch.Tensor, top_k_index: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        """`forward` of arguments that were checked, without gradients."""
        settings = self.settings
        routing = route(top_k_index, self.num_experts, self.layer_name)
        if settings.activations == "16bit":
            return combine_sorted(self._of_16_bits(x, routing), routing.inverse, p)
        a = quantize_for_experts(
            x, routing, settings.dedup, settings.search, settings.ties, row_scale=settings.row_scale
        )
        common = (settings.accum, x.dtype, None, self.layer_name)
        gate_up = expert_product(a, routing, self.quantized("gate_up"), *common)
        down = expert_product(self._quantized_activation(gate_up), routing, self.quantized("down"), *common)
        return combine_sorted(down, routing.inverse, p)

    def _activated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """act(gate) * up of [R, 2I]: [R, I] of its dtype."""
        if is_silu(self.act_fn):
            return silu_mul(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _quantized_activation(self, gate_up: torch.Tensor) -> ExpertInput:
        """act(gate) * up of [R, 2I] in NVFP4, for the down projections."""
        settings = self.settings
        if settings.fold and is_silu(self.act_fn):
            t = silu_mul_quantize_nvfp4(gate_up, settings.search, settings.ties)
        else:
            activated = self._activated(gate_up)
            t = quantize_nvfp4(activated, settings.search, settings.ties, settings.row_scale)
        return ExpertInput(t, None, len(gate_up), 0)

    def _of_16_bits(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """W4A16: the sorted rows of each expert."""
        gate_up, down = (self.quantized(name) for name in self.WEIGHTS)
        inner = expert_linear(x.index_select(0, routing.source), routing, gate_up, self.layer_name)
        return expert_linear(self._activated(inner), routing, down, self.layer_name)
