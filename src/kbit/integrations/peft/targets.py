"""What a configuration of peft would adapt or train, and what of it is refused before anything changes."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import PeftType
from torch import nn

from kbit.format.words import first_of
from kbit.integrations.peft import experts, layers
from kbit.nn import KbitEmbedding, KbitExperts
from kbit.nn.parts import QuantizedModule

_ALL_LINEAR = "all-linear"

# What a layer is called inside that of an adapter.
WRAPPED = "base_layer"

# What 16-bit experts have inside, fused or by the names of files, by which peft adapts them as parameters.
_PROJECTIONS = ("gate_proj", "up_proj", "w1", "w2", "w3", *experts.NAMES)


def check(tuner: Any, model: nn.Module, adapter_name: str) -> None:
    """Refuse an adapter that some quantized layer among its targets cannot have.

    Layers refuse it themselves as well, but by then peft has changed those in front of them.

    Args:
        tuner: one of peft's, with the adapter's configuration.
        model: to be adapted.
        adapter_name: of the new adapter.

    Raises:
        ValueError: a target is split over ranks, or cannot be adapted by LoRA as configured.
    """
    config = tuner.peft_config[adapter_name]
    for layer in _targeted(tuner, model, config):
        layers.refuse_split(layer)
        if config.peft_type == PeftType.LORA:
            layers.check_config(layer, config)
            if isinstance(layer, KbitExperts):
                experts.check_config(layer, adapter_name, config)


def _targeted(tuner: Any, model: nn.Module, config: Any) -> list[QuantizedModule]:
    """The quantized layers that a tuner would adapt, found as peft finds them."""
    if getattr(config, "target_modules", None) is None:  # a tuner has defaults for many architectures
        config = tuner._prepare_adapter_config(copy.copy(config), tuner.get_model_config(model))
    targets = getattr(config, "target_modules", None)
    if targets is None:  # parameters alone
        return []
    everything = isinstance(targets, str) and targets.lower() == _ALL_LINEAR
    heads = getattr(model, "get_output_embeddings", None)
    head = heads() if everything and heads is not None else None
    found: list[QuantizedModule] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
            continue
        layer: Any = module
        if isinstance(module, BaseTunerLayer):  # of an adapter that was there before
            layer, inside = module.get_base_layer(), (*inside, f"{name}.")
        if not isinstance(layer, QuantizedModule):
            continue
        linear = isinstance(layer, nn.Linear) and module is not head
        if linear if everything else tuner._check_target_module_exists(config, name):
            found.append(layer)
    return found


def refuse_split_tables(model: nn.Module) -> None:
    """Refuse prompts in front of a split table, in which peft finds no row for each token.

    Raises:
        ValueError: a quantized embedding of the model is split over ranks.
    """
    for module in model.modules():
        if isinstance(module, KbitEmbedding):
            layers.refuse_split(module)


def refuse_trained_codes(model: nn.Module, config: Any) -> None:
    """Refuse to train quantized modules themselves, whose codes have no gradients, alone or within others.

    Raises:
        ValueError: a configuration's modules_to_save or trainable_token_indices name one, or what holds one.
    """
    tables = getattr(config, "trainable_token_indices", None)
    if isinstance(tables, list):  # rows of the model's own table
        own = model.get_input_embeddings()  # type: ignore[operator]
        tables = [name for name, module in model.named_modules() if module is own]
    asked = {"modules_to_save": getattr(config, "modules_to_save", None), "trainable_token_indices": tables}
    for option, ends in asked.items():
        for name, module in model.named_modules(remove_duplicate=False):
            end = next((end for end in ends or () if name.endswith(end)), None)
            if end is None:
                continue
            inner = next((n for n, m in module.named_modules() if isinstance(m, QuantizedModule)), None)
            if inner is None:
                continue
            inner = inner.removesuffix(WRAPPED).removesuffix(".")
            what = f"{name} holds {inner}, which is quantized" if inner else f"{name} is quantized"
            pattern = f"{end}\\." if inner else f"{end}$"
            raise ValueError(
                f"{option}: {what}, and codes have no gradients. Adapt it by LoRA "
                f"(target_modules), or leave it in 16 bits when quantizing: overrides={{{pattern!r}: 0}}."
            )


def warn_of_left_out(model: nn.Module, config: Any) -> None:
    """Warn where an adapter's targets, which would adapt experts of 16 bits, leave out quantized ones.

    Args:
        model: to be adapted.
        config: of the adapter, before peft looks for what it matches.
    """
    targets = getattr(config, "target_modules", None) or ()
    listed = {targets} if isinstance(targets, str) else set(targets)
    wanted: set[str] = set()
    left: list[str] = []
    for name, module in model.named_modules():
        name = name.removesuffix(f".{WRAPPED}")
        if not isinstance(module, KbitExperts) or any(_matches(one, targets, name) for one in listed):
            continue
        inside = [f"{name}.{projection}" for projection in _PROJECTIONS]
        asked = {one for one in listed if any(_matches(one, targets, path) for path in inside)}
        parameters = getattr(config, "target_parameters", None) or ()
        asked |= {one for one in parameters if any(_matches(one, (), path) for path in inside)}
        if asked:
            wanted |= asked
            left.append(name)
    if left:
        warnings.warn(
            f"kbit: {', '.join(sorted(wanted))} adapt no quantized experts, which are one module a layer: "
            f'{first_of(left, shown=1)}. Put "experts" among the target_modules to train them.',
            stacklevel=4,
        )


def _matches(target: str, targets: Any, path: str) -> bool:
    """Whether one of `targets`, an expression where they are a string, finds what is in a 16-bit model."""
    if not isinstance(targets, str):
        return f".{path}".endswith(f".{target}")
    everything = target.lower() == _ALL_LINEAR
    return path.endswith(_PROJECTIONS) if everything else re.fullmatch(target, path) is not None
