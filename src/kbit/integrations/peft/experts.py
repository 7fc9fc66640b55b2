"""LoRA on fused, quantized experts.

peft adapts fused experts by adding B A to their 16-bit parameter (`target_parameters`), which here does not
exist. So the adapter is applied to activations instead, expert by expert: for the rows of expert e,
y += s (x A_e^T) B_e^T, after gate_up_proj and again after down_proj.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from kbit.nn.experts import KbitExperts
from kbit.ops import api, checks, grad_checks, moe_checks


def grouped_matmul(x: torch.Tensor, w: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """One matrix per expert on rows sorted by expert, differentiable in both.

    Args:
        x: [R, K], rows sorted by expert.
        w: [E, K, N] of x's dtype.
        bounds: int32 [E + 1]: rows bounds[e] to bounds[e + 1] are expert e's. Rows behind them give 0.

    Returns:
        [R, N].
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        # Rows of no expert are not written, neither here nor in the gradient.
        mine = (torch.arange(len(x), device=x.device, dtype=bounds.dtype) < bounds[-1])[:, None]
        y = torch._grouped_mm(x.where(mine, 0), w, offs=bounds[1:])
        return y.where(mine, 0)
    begins = bounds.tolist()
    parts = [x[begin:end] @ w[e] for e, (begin, end) in enumerate(pairwise(begins))]
    return torch.cat([*parts, x.new_zeros(len(x) - begins[-1], w.shape[-1])])


# What an adapter's parameters are called. Not as the weights: peft would take them for such.
NAMES = {"gate_up_proj": "gate_up", "down_proj": "down"}


def check_config(base: KbitExperts, adapter_name: str, config: Any) -> None:
    """Refuse what adapters of fused experts cannot have.

    Raises:
        ValueError: they would have biases, depend on the token, or be called as one of their parameters.
    """
    where = base.layer_name or type(base).__name__
    if config.lora_bias:
        raise ValueError(f"{where}: adapters of fused experts have no bias. Use lora_bias=False.")
    for option in ("alora_invocation_tokens", "arrow_config"):
        if getattr(config, option, None):
            raise ValueError(
                f"{where}: {option} is not possible on fused experts, whose adapters do not know the token "
                f"that a row is of. Adapt linear layers alone."
            )
    if adapter_name in NAMES.values():
        raise ValueError(
            f"{where}: an adapter of fused experts cannot be called {adapter_name!r}, which is what one of "
            f"its parameters is called: peft would not find it in files again. Choose another adapter_name."
        )


class LoraExperts(nn.Module, LoraLayer):
    """Low-rank adapters of gate_up_proj and down_proj of a KbitExperts.

    A is [E, r, K] and B [E, N, r] for each; B starts at 0, so a new adapter changes nothing. Dropout acts on
    what A reads. Products are in the activations' dtype, whatever the adapters are kept in.
    """

    r: dict[str, int]
    lora_alpha: dict[str, float]
    scaling: dict[str, float]
    use_rslora: dict[str, bool]
    use_dora: dict[str, bool]
    lora_bias: dict[str, bool]
    lora_A: Any
    lora_B: Any
    lora_dropout: Any
    active_adapters: list[str]
    get_base_layer: Any
    set_adapter: Any

    def __init__(
        self,
        base_layer: KbitExperts,
        adapter_name: str,
        config: Any,
        r: int = 0,
        lora_alpha: int = 1,
        parameter_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        assert isinstance(module, KbitExperts)
        return module.hidden_dim, module.hidden_dim

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter of rank r.

        Raises:
            ValueError: r is not positive, or see `check_config`.
        """
        if r <= 0:
            raise ValueError(f"r must be positive, got {r}.")
        base = self.get_base_layer()
        check_config(base, adapter_name, config)
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.use_rslora[adapter_name], self.use_dora[adapter_name] = config.use_rslora, False
        self.lora_bias[adapter_name] = False
        dropout = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        self.lora_dropout[adapter_name] = dropout
        down, up = nn.ParameterDict(), nn.ParameterDict()
        for weight, name in NAMES.items():
            experts, rows, columns = base.shapes[weight]
            device = base.codebook.device
            down[name] = nn.Parameter(torch.empty(experts, r, columns, device=device))
            up[name] = nn.Parameter(torch.zeros(experts, rows, r, device=device))
            self._initialize(down[name], up[name], config.init_lora_weights)
        self.lora_A[adapter_name], self.lora_B[adapter_name] = down, up
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @staticmethod
    def _initialize(down: torch.Tensor, up: torch.Tensor, how: Any) -> None:
        rank, columns = down.shape[1:]
        with torch.no_grad():
            if how == "gaussian":
                down.normal_(std=1 / rank)
            else:  # as kaiming_uniform_ with a = sqrt(5) draws for one matrix
                down.uniform_(-1 / math.sqrt(columns), 1 / math.sqrt(columns))
            if how is False:
                up.uniform_(-1 / math.sqrt(rank), 1 / math.sqrt(rank))

    def get_delta_weight(self, adapter: str, weight: str) -> torch.Tensor:
        """float32 [E, N, K]: what an adapter adds to a weight, "gate_up_proj" or "down_proj"."""
        down, up = (side[adapter][NAMES[weight]].float() for side in (self.lora_A, self.lora_B))
        return up @ down * self.scaling[adapter]

    def _adapted(self, x: torch.Tensor, y: torch.Tensor, weight: str, bounds: torch.Tensor) -> torch.Tensor:
        """y plus what the active adapters make of x."""
        for adapter in self.active_adapters:
            if adapter not in self.lora_A:
                continue
            down, up = (side[adapter][NAMES[weight]].to(x.dtype) for side in (self.lora_A, self.lora_B))
            short = -down.shape[1] % 8  # grouped products want rows of multiples of 16 bytes
            down, up = nn.functional.pad(down, (0, 0, 0, short)), nn.functional.pad(up, (0, short))
            inner = grouped_matmul(self.lora_dropout[adapter](x), down.transpose(1, 2), bounds)
            y = y + grouped_matmul(inner, up.transpose(1, 2), bounds) * self.scaling[adapter]
        return y

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run every token through its experts and their adapters; see KbitExperts.

        Raises:
            NotImplementedError: an argument has a forward-mode tangent, or torch.func differentiates.
            TypeError, ValueError: an argument does not fit; the message names this layer.
        """
        base = self.get_base_layer()
        grad_checks.no_tangent("experts", base.layer_name, hidden_states, top_k_weights)
        if self.disable_adapters or not any(adapter in self.lora_A for adapter in self.active_adapters):
            return base(hidden_states, top_k_index, top_k_weights)
        checks.activation("experts", hidden_states, base.hidden_dim, base.codebook.device, base.layer_name)
        moe_checks.routing(hidden_states, top_k_index, top_k_weights, base.layer_name)
        source, bounds, inverse = torch.ops.kbit.moe_align(top_k_index, base.num_experts)
        rows = hidden_states.index_select(0, source)
        gate_up = base.gate_and_up(rows, bounds)
        gate, up = self._adapted(rows, gate_up, "gate_up_proj", bounds).chunk(2, dim=-1)
        inner = base.act_fn(gate) * up
        results = self._adapted(inner, base.grouped(inner, "down_proj", bounds), "down_proj", bounds)
        return api.moe_combine(results, inverse, top_k_weights, bounds)

    def __repr__(self) -> str:
        return "lora." + super().__repr__()


def refuse_weighted(model: nn.Module, adapters: list[str]) -> None:
    """Refuse a weighted sum of adapters that adapt experts, of which peft would make one that is half done.

    Raises:
        NotImplementedError: one of `adapters` adapts experts; the message names the first layer.
    """
    for layer in model.modules():
        if not isinstance(layer, LoraExperts):
            continue
        found = next((adapter for adapter in adapters if adapter in layer.lora_A), None)
        if found is not None:
            raise NotImplementedError(
                f"{layer.get_base_layer().layer_name}: add_weighted_adapter is not possible with adapted "
                f"experts, and {found!r} adapts these. Make several adapters active at once "
                f"(model.base_model.set_adapter), or adapt linear layers alone."
            )
