"""Checkpoints and policies that a model must not be loaded or written with."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kbit.format.model_files import CONFIG_NAME
from kbit.format.names import PARTS, holder_of, is_candidate, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import TensorInfo
from kbit.format.words import first_of
from kbit.integrations.transformers.names import (
    Transforms,
    class_in,
    loading_transforms,
    modules_in_files,
    name_of_parts,
    parameter_of,
)
from kbit.nn.support import unsupported

if TYPE_CHECKING:
    from kbit.integrations.transformers.plan import Plan

_LAYER = re.compile(r"([^.]+\.)*?\d+(?=\.)")  # the first number in a name ends it


def refuse_missing(
    model: Any,
    policy: QuantizationPolicy,
    index: Mapping[str, TensorInfo],
    arrived: Mapping[str, tuple[str, str | None]],
    transforms: Transforms,
) -> None:
    """Refuse a quantized checkpoint without any tensor of a weight that its config says to be quantized.

    transformers would draw it at random. What a task adds to the model that was quantized, such as a head for
    classes, a pooler, or attention to an encoder, is not meant to be there.

    Args:
        model, policy, index: see `build_plan`.
        arrived: {tensor: what `parameter_of` says of it}, of some of the index.
        transforms: see `loading_transforms`.
    """
    state, prefix = model.state_dict(keep_vars=True), model.base_model_prefix
    rest = {original_of(name) for name in index} - arrived.keys()
    found = [*arrived.values(), *(parameter_of(name, transforms, prefix, state) for name in rest)]
    targets = {pattern: entry.target_patterns for entry in transforms[1] for pattern in entry.source_patterns}
    there = {target for target, _ in found}
    for target, pattern in found:  # a converter may make several parameters of one tensor
        first, *others = targets[pattern] if pattern else [""]
        there.update(target.replace(first, other) for other in others)
    held = {id(state[name]) for name in there if name in state}  # a parameter may have several names
    whole = type(model).__name__ in (model.config.architectures or ()) or model.base_model is model
    stored = modules_in_files(model)
    dispensable = list(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    missing = [
        name
        for name, tensor in state.items()
        if (whole or name.startswith(prefix + "."))
        and is_candidate(name, tensor.shape)
        and unsupported(model.get_submodule(holder_of(name))) is None
        and policy.bits_for(stored.get(name, module_of(name))) is not None
        and not any(re.search(pattern, name) for pattern in dispensable)
        and not held & {id(state[other]) for other in _tied(model, name) & state.keys()}
    ]
    folder = next(iter(index.values())).file.parent
    missing = _of_the_quantized(model, missing, folder)
    if missing:
        raise ValueError(
            f"{folder} holds no tensors, quantized or not, of {first_of(missing)}. Its files are incomplete, "
            f"or config.json is of another model: fetch it or quantize again."
        )


def _of_the_quantized(model: Any, names: Sequence[str], folder: Path) -> list[str]:
    """Those of a model's parameters that must be in a folder, and are not what its task adds.

    Added is what the quantized model lacked, as the folder's config describes it; but not a part that is a
    model by itself, such as a decoder, nor a further layer.
    """
    known = class_in(model.config)
    if not names or known is None or type(model) is known:
        return list(names)
    config = model.config  # which a caller may have changed
    if (folder / CONFIG_NAME).is_file():
        config = type(config).from_pretrained(folder)
    with torch.device("meta"):
        quantized = known(config)
    there = {name.removeprefix(quantized.base_model_prefix + ".") for name in quantized.state_dict()}
    layers = {match[0] for name in there if (match := _LAYER.match(name))}
    return [
        name
        for name in names
        if (within := name.removeprefix(model.base_model_prefix + ".")) in there
        or not _is_added(model.base_model if within != name else model, within, layers)
    ]


def _is_added(root: nn.Module, name: str, layers: Container[str]) -> bool:
    """Whether a task may add a parameter to a model that has these layers."""
    if layer := _LAYER.match(name):
        return layer[0] in layers
    steps = holder_of(name).split(".")
    parts = (root.get_submodule(".".join(steps[:end])) for end in range(1, len(steps) + 1))
    return not any(isinstance(part, PreTrainedModel) for part in parts)


def _tied(model: Any, name: str) -> set[str]:
    """A parameter, and those that are tied to it."""
    ties = getattr(model, "all_tied_weights_keys", {})
    source = ties.get(name, name)
    return {name, source, *(target for target, other in ties.items() if other == source)}


def names_of_parts(model: Any, plan: Plan) -> dict[str, str]:
    """By which names parts are to be written so that they are found: {tensor: name, without suffix}.

    By the tensor's own. transformers renames a checkpoint's tensors by patterns, some of which hold for the
    whole name alone; then by the one that saving gives.

    Args:
        model: see `build_plan`.
        plan: what is to be written, by the names of the source.

    Raises:
        ValueError: parts would be found by neither.
    """
    renamings, converters = loading_transforms(model)
    state, prefix = model.state_dict(), model.base_model_prefix
    state |= {target + part: state[target] for target in plan for part in PARTS}
    names = {}
    for target, planned in plan.items():
        # Experts one by one: kbit's own converters fuse the parts, once they are renamed.
        transforms = (renamings, [] if planned.merged else converters)
        for name in (name for names in planned.sources.values() for name in names):
            renamed = parameter_of(name, transforms, prefix, state)[0]
            wanted = [(renamed + part, None) for part in PARTS]

            def found(name: str, transforms: Transforms = transforms) -> list[tuple[str, str | None]]:
                return [parameter_of(name + part, transforms, prefix, state) for part in PARTS]

            names[name] = name
            if found(name) != wanted and not planned.merged:
                names[name] = name_of_parts(model, target)
            if found(names[name]) != wanted:
                raise ValueError(
                    f"{name}: transformers loads it as {renamed}, but its part {name}{PARTS[0]} as "
                    f"{found(name)[0][0]}, where {type(model).__name__} has nothing. Leave it unquantized "
                    f"with --skip {module_of(name)}."
                )
    return names


def refuse_unlike(model: Any, stored: Mapping[str, int | None]) -> None:
    """Refuse what the checkpoint has by several names and the policy does not treat alike.

    Of tied weights only what cannot be held is refused: a quantized weight tied to one that is not. The other
    way round the former is quantized, too (`stored_ties`), and of two widths transformers ties nothing and
    says so.

    Args:
        model: see `build_plan`.
        stored: {parameter name: its width, None if it stays unquantized}.
    """
    modules: dict[nn.Module, dict[str, int | None]] = {}
    for target, bits in stored.items():
        path = holder_of(target)
        modules.setdefault(model.get_submodule(path), {})[path] = bits
    for widths in modules.values():
        if len(set(widths.values())) > 1:
            raise _unlike(widths, "are one module")
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        unquantized = source in stored and stored[source] is None
        paths = [holder_of(name) for name in (target, source)]
        if stored.get(target) and unquantized and not unsupported(model.get_submodule(paths[1])):
            raise _unlike(dict(zip(paths, (stored[target], None), strict=True)), "are tied")


def _unlike(widths: Mapping[str, int | None], relation: str) -> ValueError:
    names = [f"{name} ({f'{bits} bits' if bits else 'unquantized'})" for name, bits in widths.items()]
    return ValueError(
        f"{' and '.join(names)} {relation}, so they must be quantized alike. Change overrides or "
        f"modules_to_not_convert to treat them alike; a quantized checkpoint has to be quantized again."
    )
