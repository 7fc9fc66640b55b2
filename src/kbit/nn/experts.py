"""KbitExperts: the fused experts of a mixture-of-experts layer on quantized weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kbit.format.autocast import autocast
from kbit.format.names import SCALE
from kbit.format.policy import QuantizationPolicy
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import at
from kbit.nn import symbolic
from kbit.nn.fuse import quantize_fused
from kbit.nn.fused_experts import WEIGHTS, unsupported_experts, weight_of
from kbit.nn.parts import QuantizedModule
from kbit.nn.refusals import require_policy
from kbit.nn.replaced import Replaced
from kbit.nn.support import is_silu, unsupported
from kbit.ops import api, checks, grad_checks, moe_checks


class KbitExperts(QuantizedModule):
    """Replaces transformers' fused experts (Qwen3MoeExperts and classes like it), with the same call.

    Each token goes through its chosen experts: down(act(gate(x)) * up(x)), weighted and summed. Rows are
    sorted by expert, stably (`kbit::moe_align`), and results are summed in the order of top_k_index
    (`kbit::moe_combine`), so equal inputs give equal bits. A single token on a GPU needs no sorting, and its
    experts' results are not rounded before they are added. Nothing waits for the device, and all sizes follow
    from those of the inputs: CUDA graphs record it, whatever the routing will be (not in float32, nor with
    block scales other than E4M4: then the host reads how many rows each expert has). An expert shared by all
    tokens is a module of its own in transformers, beside this one.

    A new one holds zeros; `from_experts` and `load_state_dict` fill it.

    Args:
        num_experts, hidden_dim, intermediate_dim, act_fn: as in the replaced module.
        bits: code width, 2 to 5.
        absmax_format: block scale format, "e4m4", "float16" or "float32".
        device: where the weights live.
        name: the module's name in its model, for error messages.
        codebook: "nf", "bof", or 2^bits ascending levels with largest magnitude 1.
    """

    # transformers' expert parallelism sets this; an id equal to num_experts then means "not mine".
    _is_expert_parallel = False

    _op = "grouped_linear"

    config: Any = None
    replaced: Replaced | None = None
    gate_up_proj_scale: torch.Tensor

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
        codebook: str | Sequence[float] | torch.Tensor = "nf",
    ) -> None:
        nn.Module.__init__(self)
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        self.act_fn = act_fn
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (num_experts, 2 * intermediate_dim, hidden_dim),
            "down_proj": (num_experts, hidden_dim, intermediate_dim),
        }
        self._init_parts(shapes, bits, codebook, absmax_format, device, name)

    @classmethod
    def empty_like(
        cls, experts: nn.Module, bits: int, absmax_format: str, name: str = "", device: Any = None
    ) -> KbitExperts:
        """A module of the same shape with empty parts.

        Raises:
            ValueError: the experts compute something that this class does not.
        """
        if reason := unsupported_experts(experts) or unsupported(experts):
            name = name or type(experts).__name__
            raise ValueError(f"{name}: cannot quantize these experts: {reason}. Leave them as they are.")
        gate_up = weight_of(experts, "gate_up_proj")
        count, twice, hidden = gate_up.shape
        device = gate_up.device if device is None else device
        layer = cls(count, hidden, twice // 2, experts.act_fn, bits, absmax_format, device, name)
        layer.config, layer.replaced = getattr(experts, "config", None), Replaced.of(experts)
        layer.training = experts.training
        return layer

    @classmethod
    @torch.inference_mode(False)  # gradients may be asked for later
    def from_experts(
        cls, experts: nn.Module, bits: int, policy: QuantizationPolicy, name: str = "", apart: bool = True
    ) -> KbitExperts:
        """Quantize fused experts.

        Args:
            experts: a module with weights gate_up_proj [E, 2 I, K] and down_proj [E, K, I], and act_fn.
            bits, name: width of both, 2 to 5; for messages.
            policy: a `QuantizationPolicy`, for the codebook, the format of block scales and their search.
            apart: whether gate and up may get factors of their own, as where checkpoints store them apart.

        Raises:
            NonFiniteWeightError: a weight holds NaN or Inf.
            TypeError: the policy is none.
            ValueError: the experts compute something that this class does not: they are laid out otherwise,
                hold more than their weights, or have a forward of their own.
        """
        require_policy(policy, "KbitExperts.from_experts")
        layer = cls.empty_like(experts, bits, policy.absmax_format, name, device="meta")
        codebook = policy.codebook_for(bits)
        settings = (bits, codebook, policy.absmax_format, policy.search)
        for weight, count in WEIGHTS.items():
            source = weight_of(experts, weight).detach()
            where = f"{name}.{weight}" if name else weight
            layer.fill(weight, quantize_fused(source, count if apart else 1, *settings, where=where))
        return layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run every token through its experts.

        Args:
            hidden_states: [T, hidden_dim].
            top_k_index: int [T, k], expert ids; num_experts, or any id outside 0..num_experts - 1, means an
                expert of another device, which adds nothing.
            top_k_weights: [T, k].

        Returns:
            [T, hidden_dim] of hidden_states' dtype, or of autocast's where that is on.

        Raises:
            NotImplementedError: an argument has a forward-mode tangent, or torch.func differentiates.
            TypeError, ValueError: an argument does not fit; the message names this layer.
        """
        if not isinstance(hidden_states, torch.Tensor):
            inputs = hidden_states, top_k_index, top_k_weights
            node = symbolic.call_of(self, self.layer_name, KbitExperts.forward, *inputs)
            if node is not None:
                return node
        moe_checks.routing(hidden_states, top_k_index, top_k_weights, self.layer_name)
        grad_checks.no_tangent("experts", self.layer_name, hidden_states, top_k_weights)
        device, hidden_states = self.codebook.device, autocast(hidden_states)
        checks.activation("experts", hidden_states, self.hidden_dim, device, self.layer_name)
        ops: Any = torch.ops.kbit
        tiles = self._layer_tiles(hidden_states, top_k_weights)
        if tiles is not None:
            scales = self.gate_up_proj_scale, self.down_proj_scale
            routed = top_k_index, top_k_weights, self.intermediate_dim
            return ops.experts_tiled(hidden_states, *tiles, self.codebook, *scales, *routed)
        source, bounds, inverse = ops.moe_align(top_k_index, self.num_experts)
        results = self.grouped(self._activated(hidden_states, bounds, source), "down_proj", bounds)
        if grad_checks.wants_grad(results, top_k_weights):
            return api.moe_combine(results, inverse, top_k_weights, bounds)
        return ops.moe_combine(results, inverse, top_k_weights, bounds)

    def _layer_tiles(
        self, x: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Both weights, if `kbit::experts_tiled` may take them: no gradients, silu, one factor each."""
        if grad_checks.wants_grad(x, weights):
            return None
        # Of other ranks' experts sorting leaves nothing to do; without it they would be read.
        if self._is_expert_parallel or not self.is_fused:
            return None
        gate_up, down = self._tiles_for_call("gate_up_proj"), self._tiles_for_call("down_proj")
        return None if gate_up is None or down is None else (gate_up, down)

    @property
    def local_part(self) -> str:
        """What of the experts is here: "all", "features" of each, or "other", as of unknown classes."""
        return "all" if type(self) is KbitExperts else "other"

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """The result of all experts, [T, hidden_dim], from that of what is here; y may be written over."""
        return y

    @property
    def is_fused(self) -> bool:
        """Whether kernels activate: silu, and one factor for gates and ups."""
        return self.gate_up_proj_scale.dim() == 1 and is_silu(self.act_fn)

    def _activated(
        self, rows: torch.Tensor, bounds: torch.Tensor, source: torch.Tensor | None = None
    ) -> torch.Tensor:
        """act(gate(x)) * up(x) of rows sorted by expert, or of rows[source]."""
        if self.is_fused and not grad_checks.wants_grad(rows):
            return self.grouped(rows, "gate_up_proj", bounds, silu_and_mul=True, source=source)
        if source is not None:
            rows = rows.index_select(0, source)
        gate, up = self.gate_and_up(rows, bounds).chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def gate_and_up(self, rows: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """[R, 2I]: gate beside up of rows [R, H] that are sorted by expert, bounds int32 [E + 1]."""
        if self.gate_up_proj_scale.dim() == 1:
            return self.grouped(rows, "gate_up_proj", bounds)
        # Gate and up have factors of their own: 2E matrices, in the order gate 0, up 0, gate 1, up 1, and
        # every expert's rows twice in a row. Row r of expert e is at r + begin[e] for gate and r + end[e] for
        # up; rows of no expert, E here, end at the last row.
        count = rows.shape[0]  # len(rows) would be fixed by torch.export
        position = torch.arange(count, device=rows.device, dtype=torch.int32)
        ids = torch.searchsorted(bounds[1:], position, right=True)
        ends = torch.cat([bounds, bounds.new_full((1,), count)])
        at_gate, at_up = position + ends[ids], position + ends[ids + 1]
        twice = rows.new_empty(2 * count, rows.shape[-1])
        twice = twice.index_copy(0, at_gate.long(), rows).index_copy(0, at_up.long(), rows)
        starts = torch.stack([2 * bounds[:-1], bounds[:-1] + bounds[1:]], dim=-1).flatten()
        results = self.grouped(twice, "gate_up_proj", torch.cat([starts, 2 * bounds[-1:]]))
        return torch.cat([results[at_gate], results[at_up]], dim=-1)

    def grouped(
        self,
        x: torch.Tensor,
        name: str,
        offsets: torch.Tensor,
        silu_and_mul: bool = False,
        source: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`kbit.grouped_linear` by the weight `name`, of x or of x[source]; the op checks what it gets."""
        tiled = self._tiles_for_call(name)
        needs_grad = grad_checks.wants_grad(x)
        if needs_grad:
            grad_checks.no_transform("experts", self.layer_name)
        *rows, columns = self._matrices(name)
        scale = getattr(self, name + SCALE).flatten()
        ops: Any = torch.ops.kbit
        if tiled is not None:
            arguments = (x, tiled, self.codebook, scale, offsets, rows[-1], columns)
            if needs_grad:
                return ops.grouped_linear_tiled_train(*arguments)
            return ops.grouped_linear_tiled(*arguments, silu_and_mul, source)
        if source is not None:
            x = x.index_select(0, source)
        packed, absmax = self._as_matrices(name, *self._canonical(name))
        op = ops.grouped_linear_train if needs_grad else ops.grouped_linear
        results = op(x, packed, absmax, self.codebook, scale, offsets, columns)
        return api.silu_and_mul(results) if silu_and_mul else results

    def _matrices(self, name: str) -> tuple[int, ...]:
        """A weight as one matrix per factor: E, or 2E where gate and up have factors of their own."""
        experts, rows, columns = self.shapes[name]
        count = getattr(self, name + SCALE).numel()
        return count, rows * experts // count if count else rows, columns

    def quantized(self, name: str = "gate_up_proj") -> QuantizedTensor:
        """A weight in the form it has, sharing this layer's memory; see `QuantizedModule.quantized`.

        Raises:
            TypeError, ValueError: `name` is neither "gate_up_proj" nor "down_proj".
        """
        self._check_name("quantized", "name", name)
        return super().quantized(name)

    def dequantize(self, name: str = "gate_up_proj", dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A weight, "gate_up_proj" or "down_proj", decoded to [E, N, K] of `dtype`.

        Raises:
            TypeError, ValueError: there is no weight of that name, or no such dtype.
        """
        self._check_name("dequantize", "name, dtype", name)
        return api.dequantize(self.quantized(name), dtype).view(self.shapes[name])

    def _check_name(self, method: str, arguments: str, name: object) -> None:
        known = ", ".join(self.shapes)
        if not isinstance(name, str):
            raise TypeError(
                f"{method}: experts have several weights, so name must be one of {known}, got {name!r:.80}"
                f"{at(self.layer_name)}. Call {method}({arguments})."
            )
        if name not in self.shapes:
            raise ValueError(
                f"{method}: name must be one of {known}, got {name!r:.80}{at(self.layer_name)}. Give one of "
                f"them."
            )

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return (
            f"num_experts={self.num_experts}, hidden_dim={self.hidden_dim}, "
            f"intermediate_dim={self.intermediate_dim}, {self._describe()}"
        )
