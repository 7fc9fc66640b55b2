"""Layers of gated delta linear attention, by kernels between their projections.

transformers runs thirty small operators there. For a token of a decoding step, whose launches would take a
GPU several times as long as the layer's quantized weights, there is one kernel, `kbit::gated_delta_step`. For
the tokens of a prompt there are those of the recurrence and one before and one behind it: the operators read
and write a prompt a dozen times, and take longer than the layer's products.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from kbit.backends.cuda import driver
from kbit.backends.cuda.gated_delta import takes, takes_steps
from kbit.nn.attention_layers import CACHE, FORMER_STATES
from kbit.nn.delta_families import FAMILIES, Family, family_of, has_own_norm, ratio_of
from kbit.nn.linear import KbitLinear
from kbit.nn.merged import MergedProjections
from kbit.nn.mixins import MixedIn, mix_in
from kbit.nn.standing_in import is_on_gpu
from kbit.nn.support import has_own_forward, is_apart
from kbit.ops import grad_checks

# A function beside the layer's class, in its module.
_MASKED = "apply_mask_to_padding_states"
_CACHES = (FORMER_STATES, CACHE)
_ARGUMENTS = [["self", "hidden_states", cache, "attention_mask", "kwargs"] for cache in _CACHES]
_PACKED = ("cu_seq", "seq_idx")  # how arguments begin that say where sequences in one row end


class _There(threading.local):
    """How many tokens of each of this thread's prompts are there, and in how many layers that was heeded."""

    count: torch.Tensor | None = None
    layers = 0


_there = _There()


@contextlib.contextmanager
def padded_prompts(count: torch.Tensor) -> Iterator[Callable[[], int]]:
    """Of prompts only the first tokens are there meanwhile; states are as if there were no others.

    Args:
        count: int64 [batch], how many of each; on the layers' device.

    Yields:
        In how many layers' calls that was so: those that `by_kernels` left to their classes do not know.
    """
    before = _there.count, _there.layers
    _there.count, _there.layers = count, 0
    try:
        yield lambda: _there.layers
    finally:
        _there.count, _there.layers = before


def by_kernels_or(own: Callable[..., Any], layer: Any, x: Any, *given: Any, **named: Any) -> Any:
    """What a layer's forward returns, by our kernels where they may.

    Args:
        own: that forward, bound to the layer.
        layer: of a class that `FAMILIES` names.
        x: hidden states [B, T, hidden].
        given, named: what else its forward was given: its cache, attention_mask, and others by name.
    """
    rest = {**named, **dict(zip((_CACHES[0], "attention_mask"), given, strict=False))}
    caches = [rest.pop(name) for name in _CACHES if name in rest]
    y = None
    if len(given) <= 2 and len(caches) <= 1:
        y = by_kernels(layer, x, caches[0] if caches else None, rest.pop("attention_mask", None), rest)
    return own(x, *given, **named) if y is None else y


def by_kernels(layer: Any, x: torch.Tensor, cache: Any, mask: Any, named: dict[str, Any]) -> Any:
    """What a layer's forward returns, by our kernels; None where it is left to that.

    Args:
        layer, x: as above.
        cache, mask, named: all else that its forward was given; mask is its attention_mask.
    """
    family = family_of(layer)
    if family is None or not _may_take(layer, x, family):
        return None
    states = None
    if cache is not None:
        index, of_layers = layer.layer_idx, getattr(cache, "layers", ())
        cached: Any = of_layers[index] if index < len(of_layers) else None
        if getattr(cached, "record_past", True):  # or it is a cache of another kind
            return None
        if cache.has_previous_state(index):
            states = cached.conv_states[0], cached.recurrent_states[0]
            if not _fit(layer, x, *states):
                return None
    if x.shape[1] == 1 and states is not None:
        return _step(layer, x, family, *states) if mask is None and _may_step(layer, x) else None
    module = sys.modules.get(family.module)
    masked = getattr(module, _MASKED, None)
    packed = any(value is not None and name.startswith(_PACKED) for name, value in named.items())
    if masked is None or packed:
        return None
    return _prompt(layer, masked(x, mask), family, cache, states)


def _projected(layer: Any, x: torch.Tensor, family: Family) -> Any:
    """Projections and gates of the rule, [B, T, ...]."""
    results = [getattr(layer, name)(x) for name in family.projections]
    return results if len(results) == 2 else (_side_by_side(*results[:2]), _side_by_side(*results[2:]))


def _side_by_side(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Both, along the last dimension; no copy of what one product has made."""
    storages = [tensor.untyped_storage().data_ptr() for tensor in (left, right)]
    ends = left.storage_offset() + left.shape[-1]
    if storages[0] == storages[1] and left.stride() == right.stride() and ends == right.storage_offset():
        return left.as_strided((*left.shape[:-1], left.shape[-1] + right.shape[-1]), left.stride())
    return torch.cat((left, right), -1)


def _step(
    layer: Any, x: torch.Tensor, family: Family, window: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    projected, gates = _projected(layer, x, family)
    y = torch.ops.kbit.gated_delta_step(
        projected.squeeze(1),
        gates.squeeze(1),
        window,
        state,
        *_weights(layer),
        layer.norm.weight,
        layer.norm.variance_epsilon,
        family.by_heads,
    )
    return layer.out_proj(y.unsqueeze(1))


def _prompt(layer: Any, x: torch.Tensor, family: Family, cache: Any, states: Any) -> torch.Tensor:
    window, state = states or (None, None)
    projected, gates = _projected(layer, x, family)
    given = projected, gates, window, *_weights(layer), _there.count
    *rows, beta, decay, last = torch.ops.kbit.gated_delta_inputs(*given, family.by_heads)
    _there.layers += 1
    if cache is not None:
        cache.update_conv_state(last, layer.layer_idx, conv_kernel_size=layer.conv_kernel_size)
    y, state = torch.ops.kbit.gated_delta_rule(*rows, beta, decay, state)
    if cache is not None:
        cache.update_recurrent_state(state, layer.layer_idx)
    norm = layer.norm.weight, layer.norm.variance_epsilon
    y = torch.ops.kbit.gated_delta_output(y, projected, *norm, family.by_heads)
    return layer.out_proj(y.flatten(2))


def _weights(layer: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return layer.conv1d.weight.squeeze(1), layer.A_log, layer.dt_bias


def _may_take(layer: Any, x: Any, family: Family) -> bool:
    """Whether kernels take a layer's input and weights, and nobody listens to its norm."""
    if torch.compiler.is_compiling() or type(x) is not torch.Tensor or x.dim() != 3 or not is_on_gpu(x):
        return False
    if torch.is_grad_enabled() or grad_checks.in_transform():
        return False
    if is_apart(layer.norm) or not has_own_norm(layer, family):
        return False
    weights, of_heads = (layer.conv1d.weight, layer.norm.weight), (layer.A_log, layer.dt_bias)
    if any(tensor.device != x.device for tensor in (*weights, *of_heads)):  # offloaded
        return False
    if torch.is_autocast_enabled(x.device.type) or any(tensor.dtype != x.dtype for tensor in weights):
        return False
    others = layer.A_log.dtype == layer.dt_bias.dtype and layer.A_log.dtype in (x.dtype, torch.float32)
    usual = layer.conv1d.bias is None and layer.activation == "silu" == layer.norm.activation
    # Of others the ops run as many small operators as the layer's own forward.
    square, taps = layer.head_k_dim == layer.head_v_dim, layer.conv1d.weight.shape[2]
    taken = square and takes(layer.head_k_dim, taps, ratio_of(layer), family.by_heads)
    return others and usual and taken


def _may_step(layer: Any, x: torch.Tensor) -> bool:
    """Whether the step is one kernel."""
    if x.device.type != "cuda":
        return True
    return takes_steps(ratio_of(layer), driver.device_limits(x.device.index).arch)


def _fit(layer: Any, x: torch.Tensor, window: torch.Tensor, state: torch.Tensor) -> bool:
    """Whether what a cache holds is as the ops take it."""
    if window.device != x.device or state.device != x.device:  # offloaded
        return False
    if window.shape[2] != layer.conv1d.weight.shape[2] or len(window) != len(x):
        return False
    alike = window.dtype == x.dtype and state.dtype == torch.float32
    return alike and window.is_contiguous() and state.is_contiguous()


class _RunsByKernels(MixedIn):
    def forward(self, hidden_states: Any, *given: Any, **named: Any) -> Any:
        """As its own class."""
        return by_kernels_or(super().forward, self, hidden_states, *given, **named)


class MergedGatedDelta(MergedProjections, _RunsByKernels):
    """A layer whose projections are multiplied in one launch, and whose rest runs by few kernels."""


def merge_gated_delta(model: nn.Module) -> None:
    """Have layers of gated delta attention run by few kernels from now on, in place."""
    for module in model.modules():
        family = family_of(module) if type(module).__name__ in FAMILIES else None
        if family is None or isinstance(module, MixedIn) or has_own_forward(module):
            continue
        known = list(inspect.signature(type(module).forward).parameters) in _ARGUMENTS
        if known and all(isinstance(module._modules.get(name), KbitLinear) for name in family.projections):
            mix_in(module, MergedGatedDelta)
            assert isinstance(module, MergedGatedDelta)
            module.join()
