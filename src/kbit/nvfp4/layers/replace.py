"""Replace a model's linear layers and fused experts by NVFP4 ones, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from kbit.nn.fused_experts import is_experts
from kbit.nn.support import keep_device_hook, keep_hooks, left_alone, names_of_modules, unsupported
from kbit.nvfp4.layers.experts import NVFP4Experts
from kbit.nvfp4.layers.linear import NVFP4Linear
from kbit.nvfp4.layers.parts import NVFP4Module, NVFP4Settings

# Whether to quantize the module of this name.
Chooser = Callable[[str], bool]


def replaceable(model: nn.Module, choose: Chooser) -> Iterator[tuple[list[str], nn.Module]]:
    """Modules that `replace_layers` replaces, with all names of each: linear layers and fused experts.

    A module is chosen by all its names. A linear layer whose weight is tied to another parameter stays as it
    is, and so does what `kbit.nn.support.unsupported` refuses, such as a module with a forward of its own.
    """
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    for module, known in names_of_modules(model).items():
        if not all(name and choose(name) for name in known) or unsupported(module):
            continue
        untied = type(module) is nn.Linear and owners.get(id(module.weight)) == 1
        if untied or is_experts(module):
            yield known, module


def replace_layers(
    model: nn.Module, settings: NVFP4Settings, choose: Chooser, empty: bool = False
) -> list[str]:
    """Put NVFP4 layers in place of others.

    Args:
        model: any model; each 16-bit weight is freed as soon as its codes exist.
        settings: of every new layer.
        choose: which modules, by name.
        empty: leave the weights to a checkpoint.

    Returns:
        Names of the replaced modules, the first of each.

    Raises:
        NonFiniteError: a weight holds NaN or Inf; layers before it are replaced already.
    """
    replaced = []
    alone = {} if empty else left_alone(model)
    for (name, *others), module in replaceable(model, lambda name: name not in alone and choose(name)):
        layer: NVFP4Module
        if isinstance(module, nn.Linear):
            make = NVFP4Linear.empty_like if empty else NVFP4Linear.from_linear
            layer = make(module, settings, name)
        else:
            make_experts = NVFP4Experts.empty_like if empty else NVFP4Experts.from_experts
            layer = make_experts(module, settings, name)
        layer.training = module.training
        keep_hooks(module, layer)
        keep_device_hook(module, layer)
        for each in (name, *others):
            model.set_submodule(each, layer)
        replaced.append(name)
    return replaced
