"""Fused experts in vLLM.

While a checkpoint is loaded, a layer of E experts, H features and an intermediate size I has

    w13_weight_packed  int32 [E, 2I, blocks * bits]: gate above up      w2_weight_packed  [E, H, ...]
    w13_weight_absmax  uint8 (or the format's) [E, 2I, blocks]          w2_weight_absmax  [E, H, ...]
    w13_weight_scale   float32 [E, 2]: factors of gate and up           w2_weight_scale   [E]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from kbit.format.policy import QuantizationPolicy
from kbit.integrations.vllm.parameters import (
    PARTS,
    ExpertsFilling,
    empty_parts,
    refuse_split_blocks,
    take_parts,
)
from kbit.nn import KbitExperts
from kbit.nn.fuse import Parts, fuse_factors

_ACTIVATIONS = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: nn.GELU(approximate="tanh"),
}
# How vLLM calls the weights of its layers, and `KbitExperts` its own.
_WEIGHTS = {"w13": "gate_up_proj", "w2": "down_proj"}


class KbitExpertsMethod(FusedMoEMethodBase):
    """Tokens through their experts by `KbitExperts`; routing and shared experts are vLLM's.

    Args:
        policy: the checkpoint's.
        bits: width of the experts.
        moe: vLLM's settings of the layer.
        name: the layer's, for messages.
    """

    def __init__(self, policy: QuantizationPolicy, bits: int, moe: Any, name: str) -> None:
        super().__init__(moe)
        self.policy, self.bits, self.name = policy, bits, name

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: vLLM's own kernels do not run here."""
        return None

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parts, empty.

        Raises:
            ValueError: the layer computes what `KbitExperts` does not, vLLM's settings want kernels of its
                own, or a rank's columns are no whole blocks.
        """
        _refuse_others(layer, self.moe, self.name)
        _refuse_settings(self.moe, self.name)
        self.sizes = num_experts, hidden_size, intermediate_size_per_partition
        whole = intermediate_size_per_partition * self.moe.moe_parallel_config.tp_size
        refuse_split_blocks(
            intermediate_size_per_partition, whole, self.name, ", or whole experts (--enable-expert-parallel)"
        )
        load = extra_weight_attrs["weight_loader"]
        self.filling = ExpertsFilling(load)
        count, hidden, middle = self.sizes
        empty = {
            "w13": empty_parts(self.policy, [count, 2 * middle], hidden, self.bits, [count, 2]),
            "w2": empty_parts(self.policy, [count, hidden], middle, self.bits, [count]),
        }
        for weight, parts in empty.items():
            loaders = (self.filling, load, ExpertsFilling(load))
            for part, tensor, loader in zip(PARTS, parts, loaders, strict=True):
                parameter: Any = nn.Parameter(tensor, requires_grad=False)
                parameter.weight_loader = loader
                parameter.quant_method = "tensor"  # of factors: one for each matrix, says vLLM's loader
                layer.register_parameter(f"{weight}_{part}", parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Put `KbitExperts` in the place of the parts, as tiles where a kernel takes them.

        Raises:
            ValueError: the checkpoint lacked something.
        """
        count = self.sizes[0]
        self.filling.refuse_missing(3 * count, self.name)  # gate, up, down
        codebook = self.policy.codebook_for(self.bits)
        experts = KbitExperts(
            *self.sizes,
            act_fn=_ACTIVATIONS[self.moe.activation],
            bits=self.bits,
            absmax_format=self.policy.absmax_format,
            codebook=codebook,
            device="meta",
            name=self.name,
        )
        for weight, name in _WEIGHTS.items():
            packed, absmax, scale = take_parts(layer, f"{weight}_")
            factors = fuse_factors(list(scale.unbind(-1))) if scale.dim() > 1 else scale
            experts.fill(name, Parts(packed, absmax, factors, codebook.to(packed.device)))
        experts._is_expert_parallel = layer.expert_map is not None
        layer.experts = experts

    def apply(
        self,
        layer: nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any,
        shared_experts_input: torch.Tensor | None,
    ) -> torch.Tensor:
        """[T, H] -> [T, H], summed over this rank's experts; vLLM adds shared experts itself."""
        experts: Any = layer.experts
        ranks: Any = layer.expert_map
        if ranks is not None:
            topk_ids = ranks[topk_ids.long()]  # -1 for those of other ranks
        return experts(x, topk_ids, topk_weights)


def _refuse_others(layer: Any, moe: Any, name: str) -> None:
    """Raise ValueError for what a layer of experts may have and `KbitExperts` has not."""
    if moe.activation not in _ACTIVATIONS:
        reason = f"their activation is {moe.activation.value}"
    elif moe.has_bias:
        reason = "they have biases"
    elif layer.apply_router_weight_on_input:
        reason = "the router's weights multiply their inputs"
    elif any(getattr(layer, limit, None) is not None for limit in ("swiglu_limit", "swiglu_alpha")):
        reason = "their activation is limited"
    else:
        return
    raise ValueError(
        f"{name}: kbit does not run these experts under vLLM: {reason}. Leave them unquantized "
        f"(modules_to_not_convert)."
    )


def _refuse_settings(moe: Any, name: str) -> None:
    """Raise ValueError for settings of vLLM under which it would run experts by kernels of its own."""
    lora = get_current_vllm_config().lora_config
    if lora is not None and lora.target_modules is None:
        raise ValueError(
            f"{name}: vLLM runs no adapters of experts that kbit quantized. Name the layers that have one: "
            f"--lora-target-modules qkv_proj o_proj."
        )
    ranks = moe.moe_parallel_config
    if ranks.use_all2all_kernels and not ranks.use_ag_rs_all2all_kernels:
        raise ValueError(
            f"{name}: kbit's experts take their tokens by --all2all-backend allgather_reducescatter, got "
            f"{ranks.all2all_backend}."
        )
