"""Linear layers of one input, multiplied in one launch: q, k and v of attention, gate and up of an MLP.

A launch costs a GPU some 2 us beyond the bytes that it reads, which small layers read in less. Layers stay
apart in the model, in its state and for whoever changes one; their tiles are neighbours in memory, see
`kbit.format.adjacent`, and those that are merged share codebook and factor, by which a call sees that they
still are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kbit.format.adjacent import as_one
from kbit.format.layout import TILE_ROWS
from kbit.nn.experts import is_silu
from kbit.nn.linear import KbitLinear
from kbit.nn.mixins import Joining, MixedIn, mix_in
from kbit.nn.support import has_own_forward
from kbit.nn.tiling import make_neighbours
from kbit.ops import direct, grad_checks

# Names of layers that modules of transformers call with one input, in the order of their merged rows.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
_MLP = ("gate_proj", "up_proj", "down_proj")
_DTYPES = (torch.float16, torch.bfloat16)


class Call:
    """One call of a module: the results of its siblings, computed together when the first is asked for."""

    def __init__(self, layers: list[KbitLinear]) -> None:
        self.layers = layers
        self.x: torch.Tensor | None = None
        self.results: tuple[torch.Tensor, ...] = ()

    def result_of(self, layer: KbitLinear, x: torch.Tensor) -> torch.Tensor | None:
        """A layer's product with x; None if it must compute that itself."""
        if self.x is None:
            y = _product(self.layers, x, silu_and_mul=False) if takes(self.layers, x) else None
            if y is None:
                return None
            self.x, self.results = x, y.split([one.out_features for one in self.layers], dim=-1)
        if self.x is not x:
            return None
        for sibling, result in zip(self.layers, self.results, strict=True):
            if sibling is layer:
                return result
        return None


class Merged(Joining):
    """A module whose layers share inputs."""

    prefix = "Merged"

    def siblings(self) -> list[list[KbitLinear]]:
        """Layers with one input that may be merged; two or more of each kind."""
        raise NotImplementedError

    def join(self) -> None:
        """Give siblings one codebook and one factor, too."""
        for layers in self.siblings():
            first, biases = layers[0], _biases(layers)
            alike = all(
                (layer.in_features, layer.levels) == (first.in_features, first.levels)
                and layer.weight_scale.device == first.weight_scale.device
                and "weight_scale" in layer._buffers  # all factors are 1
                for layer in layers
            ) and all((bias.dtype, bias.device) == (biases[0].dtype, first.weight.device) for bias in biases)
            if alike and not any(layer.out_features % TILE_ROWS for layer in layers[:-1]):
                make_neighbours([layer.weight for layer in layers])
                if biases:
                    make_neighbours(biases)
                for layer in layers[1:]:
                    layer.codebook, layer.weight_scale = first.codebook, first.weight_scale


class MergedProjections(Merged):
    """Attention, or what stands for it: the first of siblings that is called computes for all."""

    def siblings(self) -> list[list[KbitLinear]]:
        """See the base class."""
        groups = [_mergeable(self, names) for names in _SIBLINGS]
        return [layers for layers in groups if len(layers) > 1]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its own class."""
        groups = [layers for layers in self.siblings() if are_joined(layers)]
        for layers in groups:
            call = Call(layers)
            for layer in layers:
                layer.merged_call = call
        try:
            return super().forward(*args, **kwargs)
        finally:
            for layers in groups:
                for layer in layers:
                    layer.merged_call = None


class MergedMLP(Merged):
    """down(silu(gate(x)) * up(x)), with the middle in one launch."""

    down_proj: nn.Module

    def siblings(self) -> list[list[KbitLinear]]:
        """See the base class."""
        layers = _mergeable(self, _MLP[:2])
        return [layers] if len(layers) > 1 and not any(layer._forward_hooks for layer in layers) else []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its own class."""
        for layers in self.siblings() if args and not kwargs else ():
            takes_it = are_joined(layers) and takes(layers, args[0])
            y = _product(layers, args[0], silu_and_mul=True) if takes_it else None
            if y is not None:
                return self.down_proj(y)
        return super().forward(*args, **kwargs)


def merge_layers(model: nn.Module) -> None:
    """Have layers of one input be multiplied together from now on, in place, where they are in tiles."""
    for module in model.modules():
        if isinstance(module, MixedIn) or has_own_forward(module):
            continue
        kind = _kind(module)
        if kind is not None:
            mix_in(module, kind)
            assert isinstance(module, Merged)
            module.join()


def _kind(module: nn.Module) -> type[Merged] | None:
    """What a module is mixed with, or None."""

    def has(names: Sequence[str]) -> bool:
        return sum(isinstance(module._modules.get(name), KbitLinear) for name in names) > 1

    if has(_MLP[:2]):
        return MergedMLP if _is_silu_mlp(module) else None
    if any(has(names) for names in _SIBLINGS) and _has_one_input(module):
        return MergedProjections
    return None


def _has_one_input(module: nn.Module) -> bool:
    """Whether layers of a module have its one input. Others would work, and compute for nothing."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return names[:1] == ["hidden_states"] and not any(name.endswith("_states") for name in names[1:])


@torch.no_grad()
def _is_silu_mlp(module: nn.Module) -> bool:
    """Whether a module's class computes down(silu(gate(x)) * up(x)); tried on layers of a few features."""
    names = list(inspect.signature(type(module).forward).parameters)
    activation = getattr(module, "act_fn", None)
    children = {*_MLP, *(("act_fn",) if isinstance(activation, nn.Module) else ())}
    own_tensors = any(each is not None for each in (*module._parameters.values(), *module._buffers.values()))
    if len(names) != 2 or not is_silu(activation) or set(module._modules) != children or own_tensors:
        return False
    generator = torch.Generator().manual_seed(0)
    layers = {
        name: nn.Linear(8, 8, bias=False, device="meta") for name in _MLP
    }  # draws no numbers of others'
    for layer in layers.values():
        layer.weight = nn.Parameter(torch.randn(8, 8, generator=generator, device="cpu", dtype=torch.float32))
    made = type(module).__new__(type(module))
    vars(made).update(vars(module))
    made._modules = {**module._modules, **layers}
    x = torch.randn(4, 8, generator=generator, device="cpu", dtype=torch.float32)
    gate, up, down = (layers[name] for name in _MLP)
    try:
        y = type(module).forward(made, x)
        return torch.allclose(y, down(nn.functional.silu(gate(x)) * up(x)), rtol=1e-5, atol=1e-6)
    except Exception:  # a class that wants something else stays as it is
        return False


def _mergeable(module: nn.Module, names: Sequence[str]) -> list[KbitLinear]:
    """Those children that are quantized layers in tiles, without what merging would pass by."""
    found: list[KbitLinear] = []
    for name in names:
        layer = module._modules.get(name)
        if type(layer) is not KbitLinear or layer._forward_pre_hooks or layer._held("weight") is None:
            continue
        alike = not found or (layer.bias is None) == (found[0].bias is None)
        if alike and layer not in found:
            found.append(layer)
    return found


def are_joined(layers: list[KbitLinear]) -> bool:
    """Whether they were joined, and no layer's weight is another since."""
    first = layers[0]
    for layer in layers[1:]:
        if layer.codebook is not first.codebook or layer.weight_scale is not first.weight_scale:
            return False
    return True


def _biases(layers: list[KbitLinear]) -> list[torch.Tensor]:
    """The biases of siblings, of which all have one or none."""
    return [layer.bias for layer in layers if layer.bias is not None]


def takes(layers: Sequence[KbitLinear], x: torch.Tensor) -> bool:
    """Whether layers may be merged for an input: of 16 bits, nothing to differentiate, no error to report."""
    first = layers[0]
    if type(x) is not torch.Tensor or x.dtype not in _DTYPES or x.shape[-1:] != (first.in_features,):
        return False
    needs_grad = x.requires_grad
    for layer in layers:
        if layer.bias is not None:
            needs_grad = needs_grad or layer.bias.requires_grad
            if layer.bias.dtype != x.dtype:
                return False
    if (needs_grad and torch.is_grad_enabled()) or grad_checks.in_transform():
        return False
    return x.device == first.weight.device and not torch.is_autocast_enabled(x.device.type)


def _product(layers: list[KbitLinear], x: torch.Tensor, silu_and_mul: bool) -> torch.Tensor | None:
    """[..., the rows of all layers], or silu of the first's times the second's; None: not in one launch."""
    first = layers[0]
    tiles, biases = [layer.weight for layer in layers], _biases(layers)
    constants, columns = (first.codebook, first.weight_scale), first.in_features
    sizes = [layer.out_features for layer in layers]
    if not torch.compiler.is_compiling():  # which cannot see addresses, the op does
        whole, bias = as_one(tiles), as_one(biases) if biases else None
        if whole is None or (biases and bias is None):
            return None
        y = direct.linear(x, (whole, *constants), bias, sum(sizes), columns, silu_and_mul)
        if y is not None:
            return y
    return torch.ops.kbit.merged_linear_tiled(x, tiles, *constants, biases, sizes, columns, silu_and_mul)
