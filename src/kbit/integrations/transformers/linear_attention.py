"""Gated delta linear attention of decoding steps in one kernel, `kbit::gated_delta_step`.

Between the projections of a layer transformers runs thirty small operators for a token, whose launches take a
GPU several times as long as the layer's quantized weights. torch.compile fuses most of them by itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.backends.cuda.gated_delta import takes
from kbit.integrations.transformers.standing_in import standing_in
from kbit.ops.gated_delta_schemas import LAYER

# Where transformers has the class whose forward this stands in for, by the model's own order of projections.
_MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"


@contextlib.contextmanager
def fused_linear_attention() -> Iterator[None]:
    """Layers of Qwen3-Next take a token's step in one kernel between their projections."""
    cls = getattr(sys.modules.get(_MODULE), LAYER, None)
    if cls is None:
        yield
        return
    with standing_in(cls, "forward", _fused):
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(
        layer: Any, hidden_states: Any, cache_params: Any = None, attention_mask: Any = None, **named: Any
    ) -> Any:
        states = _states(layer, hidden_states, cache_params, attention_mask)
        if states is None:
            return own(layer, hidden_states, cache_params, attention_mask, **named)
        projected, gates = layer.in_proj_qkvz(hidden_states), layer.in_proj_ba(hidden_states)
        weights = layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias, layer.norm.weight
        y = torch.ops.kbit.gated_delta_step(
            projected.squeeze(1), gates.squeeze(1), *states, *weights, layer.norm.variance_epsilon
        )
        return layer.out_proj(y.unsqueeze(1))

    return forward


def _is_on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def _states(layer: Any, x: Any, cache: Any, mask: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The window and the state of a layer in its cache, for a step that the kernel takes; None for others."""
    if torch.compiler.is_compiling() or cache is None or mask is not None:
        return None
    if not _is_on_gpu(x) or x.shape[1] != 1 or (torch.is_grad_enabled() and x.requires_grad):
        return None
    cached = cache.layers[layer.layer_idx]
    if getattr(cached, "record_past", True) or not cache.has_previous_state(layer.layer_idx):
        return None
    window, state = cached.conv_states[0], cached.recurrent_states[0]
    weights, of_heads = (layer.conv1d.weight, layer.norm.weight), (layer.A_log, layer.dt_bias)
    if any(tensor.device != x.device for tensor in (window, state, *weights, *of_heads)):  # offloaded
        return None
    alike = all(tensor.dtype == x.dtype for tensor in (window, *weights)) and state.dtype == torch.float32
    others = layer.A_log.dtype == layer.dt_bias.dtype and layer.A_log.dtype in (x.dtype, torch.float32)
    usual = layer.conv1d.bias is None and layer.activation == "silu" == layer.norm.activation
    square = state.shape[2] == state.shape[3] and window.shape[2] == layer.conv1d.weight.shape[2]
    # Of others the op runs as many small operators as the layer's own forward.
    taken = square and takes(state.shape[2], window.shape[2], layer.num_v_heads / layer.num_k_heads)
    in_place = window.is_contiguous() and state.is_contiguous()
    return (window, state) if alike and others and usual and taken and in_place else None
