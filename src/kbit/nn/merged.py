"""Linear layers of one input, multiplied in one launch: q, k and v of attention, gate and up of an MLP.

A launch costs a GPU some 2 us beyond the bytes that it reads, which small layers read in less. Layers stay
apart in the model, in its state and for whoever changes one; their tiles are neighbours in memory, see
`kbit.format.adjacent`, and those that are merged share codebook and factor, by which a call sees that they
still are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from kbit.format.adjacent import as_one
from kbit.format.layout import TILE_ROWS
from kbit.format.versions import version_of
from kbit.nn.linear import KbitLinear
from kbit.nn.mixins import Joining, MixedIn, mix_in, stand_in
from kbit.nn.rotary import fused_rotary, modules_of
from kbit.nn.standing_in import trial
from kbit.nn.support import has_own_forward, is_apart, is_silu
from kbit.nn.tiling import make_neighbours
from kbit.ops import checks, direct, grad_checks

# Names of layers that modules of transformers call with one input, in the order of their merged rows.
_SIBLINGS = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
)
_MLP = ("gate_proj", "up_proj", "down_proj")
_PARTS = ("all", "rows")  # of layers whose own products are all that they compute


class Siblings(NamedTuple):
    """Layers with one input, two or more, as they are in a call; all with a bias or none.

    Attributes:
        layers: in the order of their rows.
        tiles: their weights.
        biases: theirs; empty if they have none.
    """

    layers: list[KbitLinear]
    tiles: list[torch.Tensor]
    biases: list[torch.Tensor]


class Call:
    """One call of a module: the results of its siblings, computed together when the first is asked for."""

    def __init__(self, siblings: Siblings) -> None:
        self.siblings = siblings
        # The input, its version, and its results: one attribute, since threads may share a call.
        self.made: tuple[torch.Tensor, int, tuple[torch.Tensor, ...]] | None = None

    def result_of(self, layer: KbitLinear, x: torch.Tensor) -> torch.Tensor | None:
        """A layer's product with x; None if it must compute that itself."""
        layers, made = self.siblings.layers, self.made
        if made is None:
            y = _product(self.siblings, x, silu_and_mul=False)
            if y is None:
                return None
            made = x, version_of(x), y.split_with_sizes([one.out_features for one in layers], dim=-1)
            self.made = made
        if made[0] is not x or made[1] != version_of(x):
            return None
        for sibling, result in zip(layers, made[2], strict=True):
            if sibling is layer:
                return result
        return None


class Merged(Joining):
    """A module whose layers share inputs."""

    prefix = "Merged"

    def siblings(self) -> list[Siblings]:
        """Layers with one input that may be merged."""
        raise NotImplementedError

    def join(self) -> None:
        """Give siblings one codebook and one factor, too."""
        for layers, tiles, biases in self.siblings():
            first = layers[0]
            alike = all(
                (layer.in_features, layer.levels) == (first.in_features, first.levels)
                and layer.weight_scale.device == first.weight_scale.device
                and "weight_scale" in layer._buffers  # all factors are 1
                for layer in layers
            ) and all((bias.dtype, bias.device) == (biases[0].dtype, tiles[0].device) for bias in biases)
            if alike and not any(layer.out_features % TILE_ROWS for layer in layers[:-1]):
                make_neighbours(tiles)
                if biases:
                    make_neighbours(biases)
                for layer in layers[1:]:
                    layer.codebook, layer.weight_scale = first.codebook, first.weight_scale


class MergedProjections(Merged):
    """Attention, or what stands for it: the first of siblings that is called computes for all.

    On a GPU, queries and keys are turned in one launch, too.
    """

    def siblings(self) -> list[Siblings]:
        """See the base class."""
        # The cache saves a search; torch.compile, which traces once, would warn of it.
        compiling = torch.compiler.is_compiling()
        among = _SIBLINGS if compiling else _groups_among(tuple(self._modules))
        groups = [_mergeable(self, names) for names in among]
        return [group for group in groups if group is not None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its own class."""
        groups = [group for group in self.siblings() if are_joined(group)]
        for group in groups:
            call = Call(group)
            for layer in group.layers:
                _set_call(layer, call)
        try:
            if torch.compiler.is_compiling() or not _is_on_gpu(self):
                return super().forward(*args, **kwargs)
            with fused_rotary(modules_of(self.own.forward)):
                return super().forward(*args, **kwargs)
        finally:
            for group in groups:
                for layer in group.layers:
                    _set_call(layer, None)


class MergedMLP(Merged):
    """down(silu(gate(x)) * up(x)), with the middle in one launch."""

    act_fn: Any
    down_proj: nn.Module

    def siblings(self) -> list[Siblings]:
        """See the base class."""
        group = _mergeable(self, _MLP[:2])
        if group is None or any(map(is_apart, group.layers)) or not is_silu(self.act_fn):
            return []
        return [group]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its own class."""
        for group in self.siblings() if args and not kwargs else ():
            y = _product(group, args[0], silu_and_mul=True) if are_joined(group) else None
            if y is not None:
                return self.down_proj(y)
        return super().forward(*args, **kwargs)


def _is_on_gpu(module: nn.Module) -> bool:
    layers = (layer for layer in module._modules.values() if isinstance(layer, KbitLinear))
    return any(layer.local_part in _PARTS and layer.codebook.is_cuda for layer in layers)


def _set_call(layer: KbitLinear, call: Call | None) -> None:
    """Set `merged_call`, past nn.Module's own search for parameters, which takes a microsecond."""
    object.__setattr__(layer, "merged_call", call)


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


@trial
def _is_silu_mlp(module: nn.Module) -> bool:
    """Whether a module's class computes down(silu(gate(x)) * up(x)); tried on layers of a few features."""
    names = list(inspect.signature(type(module).forward).parameters)
    activation = getattr(module, "act_fn", None)
    children = {*_MLP, *(("act_fn",) if isinstance(activation, nn.Module) else ())}
    own_tensors = any(each is not None for each in (*module._parameters.values(), *module._buffers.values()))
    if len(names) != 2 or not is_silu(activation) or set(module._modules) != children or own_tensors:
        return False
    generator = torch.Generator().manual_seed(0)
    # On the meta device, which draws no numbers of others'.
    layers = {name: nn.Linear(8, 8, bias=False, device="meta") for name in _MLP}
    for layer in layers.values():
        layer.weight = nn.Parameter(torch.randn(8, 8, generator=generator, device="cpu", dtype=torch.float32))
    made = stand_in(module)
    made._modules = {**module._modules, **layers}
    x = torch.randn(4, 8, generator=generator, device="cpu", dtype=torch.float32)
    x = torch.cat([x, 100 * x])  # some classes clamp what is large
    gate, up, down = (layers[name] for name in _MLP)
    y = type(module).forward(made, x)
    return torch.allclose(y, down(nn.functional.silu(gate(x)) * up(x)), rtol=1e-5, atol=1e-6)


@functools.cache
def _groups_among(names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """The groups of `_SIBLINGS` of which a module has two or more, by its children's names; and those."""
    found = [tuple(name for name in group if name in names) for group in _SIBLINGS]
    return tuple(group for group in found if len(group) > 1)


def _mergeable(module: nn.Module, names: Sequence[str]) -> Siblings | None:
    """Those children that are layers in tiles, without what merging would pass by; None of fewer than two."""
    layers: list[KbitLinear] = []
    tiles: list[torch.Tensor] = []
    biases: list[torch.Tensor] = []
    for name in names:
        layer = module._modules.get(name)
        if not isinstance(layer, KbitLinear) or layer.local_part not in _PARTS or layer._forward_pre_hooks:
            continue
        held, bias = layer._held("weight"), layer.bias
        if held is None or layer in layers or (layers and (bias is None) == bool(biases)):
            continue
        layers.append(layer)
        tiles.append(held)
        if bias is not None:
            biases.append(bias)
    return Siblings(layers, tiles, biases) if len(layers) > 1 else None


def are_joined(siblings: Siblings) -> bool:
    """Whether they were joined, and no layer's weight is another since."""
    # Looked up here for speed: nn.Module's own way takes twice as long.
    first, *others = [layer._buffers for layer in siblings.layers]
    codebook, scale = first.get("codebook"), first.get("weight_scale")
    for buffers in others:
        if buffers.get("codebook") is not codebook or buffers.get("weight_scale") is not scale:
            return False
    return scale is not None


def takes(
    x: torch.Tensor, in_features: int, device: torch.device, biases: Sequence[torch.Tensor] = ()
) -> bool:
    """Whether layers may be merged for an input: of 16 bits, nothing to differentiate, no error to report."""
    if type(x) is not torch.Tensor or x.dtype not in checks.HALF_DTYPES or x.shape[-1:] != (in_features,):
        return False
    if x.is_meta or any(bias.dtype != x.dtype for bias in biases):
        return False
    if grad_checks.wants_grad(x, *biases) or grad_checks.in_transform():
        return False
    return x.device == device and not torch.is_autocast_enabled(x.device.type)


def _product(siblings: Siblings, x: torch.Tensor, silu_and_mul: bool) -> torch.Tensor | None:
    """[..., the rows of all layers], or silu of the first's times the second's; None: not in one launch."""
    layers, tiles, biases = siblings
    first = layers[0]
    constants, columns = (first.codebook, first.weight_scale), first.in_features
    if not takes(x, columns, tiles[0].device, biases):
        return None
    sizes = [layer.out_features for layer in layers]
    if not torch.compiler.is_compiling():  # which cannot see addresses, the op does
        whole, bias = as_one(tiles), as_one(biases) if biases else None
        if whole is None or (biases and bias is None):
            return None
        y = direct.linear(x, (whole, *constants), bias, sum(sizes), columns, silu_and_mul)
        if y is not None:
            return y
    return torch.ops.kbit.merged_linear_tiled(x, tiles, *constants, biases, sizes, columns, silu_and_mul)
