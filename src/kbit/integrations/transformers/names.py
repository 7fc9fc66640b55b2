"""What a model's modules are called in its files: transformers renames some while it loads and saves.

A policy is asked with both names of a module (`QuantizationPolicy.bits_for`), so that it decides alike for
files and for a model in memory. The config of a checkpoint speaks of the names in its files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

from kbit.format.names import PACKED, holder_of, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.key_mapping import key_mapping
from kbit.nn import KbitEmbedding, KbitLinear
from kbit.nn.fused_experts import is_experts
from kbit.nn.parts import QuantizedModule

Transforms = tuple[list[WeightRenaming], list[WeightConverter]]


def class_in(config: Any) -> Any:
    """The class of models that a config names in `architectures`; None if transformers has none so called."""
    found: Any = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def loading_transforms(model: Any) -> Transforms:
    """What transformers does to the names and tensors of a checkpoint when it loads this model."""
    conversions = get_model_conversion_mapping(model, key_mapping=key_mapping())
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in conversions if isinstance(entry, WeightConverter)]


def parameter_of(
    name: str, transforms: Transforms, prefix: str, state: Mapping[str, Any]
) -> tuple[str, str | None]:
    """The model's parameter that a checkpoint tensor goes to, as transformers' loader finds it.

    Args:
        name: the tensor's.
        transforms: see `loading_transforms`.
        prefix: the model's `base_model_prefix`.
        state: the model's state dict.

    Returns:
        The parameter, which is not in `state` if this class of model does not use the tensor; and the pattern
        of the converter that makes it, with other tensors perhaps, or None.
    """
    target, pattern = rename_source_key(name, *transforms, prefix, state)
    if target not in state and name in state:
        return rename_source_key(name, [], [], prefix, state)
    return target, pattern


def own_conversions(model: Any) -> list:
    """What transformers itself would undo when saving a model that it did not load."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    # As in transformers: whether a prefix was dropped on loading is not known of such a model.
    return [entry for entry in conversions if not isinstance(entry, PrefixChange)]


def modules_in_files(model: Any) -> dict[str, str]:
    """{parameter: its module's name in the files that saving writes}, quantized parameters by their own name.

    Args:
        model: a PreTrainedModel, quantized or not.
    """
    undone = _undone(model)
    originals = ((key, original_of(key)) for key in model.state_dict())
    return {
        original: module_of(_undo(original, key.removeprefix(original), undone))
        for key, original in originals
    }


def names_in_files(model: Any) -> dict[str, list[str]]:
    """{module: its names in the files that saving writes}, of the modules that are called otherwise there.

    Experts may have two: Granite's are input_linear and output_linear there.

    Args:
        model: a PreTrainedModel, quantized or not.
    """
    names: dict[str, list[str]] = {}
    for parameter, stored in modules_in_files(model).items():
        found = names.setdefault(module_of(parameter), [])
        if stored not in found:
            found.append(stored)
    return {name: found for name, found in names.items() if found != [name]}


def fused_in_files(model: Any, names: Iterable[str] | None = None) -> set[str]:
    """The modules of fused experts of which the files that saving writes hold gate above up in one tensor.

    Args:
        model: a PreTrainedModel, quantized or not.
        names: of modules of fused experts; by default of all that are not quantized.
    """
    converters = [entry for entry in _undone(model) if isinstance(entry, WeightConverter)]
    converters = [entry for entry in converters if len(entry.target_patterns) > 1]  # that split them
    if names is None:
        names = [name for name, module in model.named_modules() if is_experts(module)]
    return {
        name
        for name in names
        if all(entry.rename_source_key(f"{name}.gate_up_proj")[1] is None for entry in converters)
    }


def name_of_parts(model: Any, target: str) -> str:
    """What saving calls a quantized parameter that it does not split, without the suffixes of its parts."""
    return _undo(target, PACKED, _undone(model)).removesuffix(PACKED)


def converted_parts(model: Any) -> dict[str, WeightConverter]:
    """{module: what saving does to the codes of it, already reversed} where it does something."""
    converters = [entry for entry in _undone(model) if isinstance(entry, WeightConverter)]
    found: dict[str, WeightConverter] = {}
    for name in model.state_dict():
        if name == original_of(name) + PACKED:
            first = next((entry for entry in converters if entry.rename_source_key(name)[1]), None)
            found |= {} if first is None else {module_of(name): first}
    return found


def lost_in_files(model: Any) -> list[str]:
    """Quantized linear layers and embeddings whose codes saving gives names that loading does not find.

    transformers renames some weights by patterns that do not hold for their parts: Inkling2's `weight_proj`.
    """
    undone, transforms, prefix = _undone(model), loading_transforms(model), model.base_model_prefix
    layers = [
        name for name, module in model.named_modules() if isinstance(module, KbitLinear | KbitEmbedding)
    ]
    state: dict[str, None] = dict.fromkeys(name for name, _ in model.named_parameters())
    state |= {f"{name}.weight{part}": None for name in layers for part in ("", PACKED)}

    def found(weight: str, part: str) -> bool:
        return parameter_of(_undo(weight, part, undone), transforms, prefix, state)[0] == weight + part

    return [name for name in layers if found(f"{name}.weight", "") and not found(f"{name}.weight", PACKED)]


def _undone(model: Any) -> list:
    """What transformers does when it saves a model, in its order."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = own_conversions(model)
    try:
        return [entry.reverse_transform() for entry in reversed(conversions)]
    except NotImplementedError:  # such a model cannot be saved by other names than its own
        return []


def _undo(name: str, part: str, undone: list) -> str:
    """As transformers does when it saves a part: one converter at most, then every renaming.

    kbit's converters give parts the names of whole tensors. A renaming of those need not know a part's.
    """
    for entry in undone:
        if isinstance(entry, WeightConverter):
            name, matched = entry.rename_source_key(name)
            if matched is not None:
                break
    name += part
    for entry in undone:
        if not isinstance(entry, WeightConverter):
            name, _ = entry.rename_source_key(name)
    return name.replace(".*.", ".0.")  # of all experts that the name is for, any


def broken_ties(model: Any) -> set[str]:
    """Names of weights that a model ties to others, of layers that are not quantized alike."""
    found = set()
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        path, _, weight = original_of(target).rpartition(".")
        layers = model.get_submodule(path), model.get_submodule(holder_of(original_of(source)))
        # A bias may be tied, too; in layers of any form it is the same.
        of_both = all(weight in layer.shapes for layer in layers if isinstance(layer, QuantizedModule))
        if of_both and not alike(*layers):
            found.add(target)
    return found


def alike(one: Any, other: Any) -> bool:
    """Whether two layers are quantized to the same width, or neither is quantized."""
    widths = [each.bits if isinstance(each, QuantizedModule) else None for each in (one, other)]
    return widths[0] == widths[1]


def stated_policy(model: Any, policy: QuantizationPolicy) -> QuantizationPolicy:
    """The policy to be saved with a quantized model; see `QuantizationPolicy.stating`.

    Args:
        model: a PreTrainedModel, after it was quantized.
        policy: the one that it was quantized by.
    """
    # The ends of ties that are not stored.
    tied = getattr(model, "all_tied_weights_keys", {}).keys() - broken_ties(model)
    undone = _undone(model)
    layers: dict[str, QuantizedModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedModule) and f"{name}.weight{PACKED}" not in tied:
            # Experts may be stored under two names.
            keys = [f"{name}.{weight}" for weight in module.shapes]
            layers |= {module_of(_undo(key, PACKED, undone)): module for key in keys}
    if not layers:
        return policy
    widths = {name: layer.bits for name, layer in layers.items()}
    # Alike in all layers, see `quantize_model`.
    levels = {layer.bits: layer.levels for layer in layers.values()}
    return policy.stating(widths, levels, next(iter(layers.values())).absmax_format)
