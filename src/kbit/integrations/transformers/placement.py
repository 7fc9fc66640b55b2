"""Putting empty quantized layers into a model on the meta device, and keeping tied weights tied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kbit.format.names import ABSMAX, PACKED, SCALE, holder_of, module_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import TensorInfo, read_header
from kbit.integrations.transformers.drawn import undo_after_loading
from kbit.integrations.transformers.plan import Plan
from kbit.nn.experts import KbitExperts
from kbit.nn.parts import QuantizedModule
from kbit.nn.replace import empty_like
from kbit.nn.support import left_alone, names_of_modules, unsupported

# (target, source) parameter names, as in PreTrainedModel.all_tied_weights_keys.
Ties = list[tuple[str, str]]


def refuse_disk(device_map: Any) -> None:
    """Refuse a device map of `from_pretrained` that keeps modules on disk.

    Raises:
        ValueError: it does; the message names the first.
    """
    places = device_map if isinstance(device_map, dict) else {}
    for name, device in places.items():
        if device == "disk":
            raise ValueError(
                f"from_pretrained: device_map has {name or 'the model'} on disk, where transformers cannot "
                f'put quantized layers. Use "cpu" there or fewer bits, or load to the CPU and then call '
                f"accelerate.disk_offload(model, folder, execution_device=...)."
            )


def read_index(checkpoint_files: Sequence[str] | None) -> dict[str, TensorInfo] | None:
    """Every tensor of the files, from their headers; None if they are not safetensors.

    Raises:
        ValueError: a file is truncated or its header is not valid.
    """
    if not checkpoint_files or not all(str(file).endswith(".safetensors") for file in checkpoint_files):
        return None
    return {name: info for file in checkpoint_files for name, info in read_header(Path(file)).items()}


def place(model: Any, plan: Plan, policy: QuantizationPolicy, placeholders: bool) -> None:
    """Replace the owner of every planned parameter by an empty quantized layer.

    Args:
        model: a PreTrainedModel on the meta device.
        plan: see `build_plan`.
        policy: for the scale format.
        placeholders: keep the unquantized parameters too, without data, so that transformers' loader finds
            the names of an unquantized checkpoint; `Quantize` removes each.
    """
    names = names_of_modules(model)
    replaced: dict[str, nn.Module] = {}
    for target, planned in plan.items():
        path = holder_of(target)
        module = model.get_submodule(path)
        if isinstance(module, QuantizedModule):
            continue
        replaced[path] = module
        layer = empty_like(module, planned.bits, policy.absmax_format, path, device="meta")
        if placeholders:
            for key in layer.shapes:
                layer._parameters[key] = module._parameters[key]
        if not placeholders or not isinstance(layer, KbitExperts):  # whose weights are their placeholders
            mark_initialized(layer, layer.shapes)
        for name in names[module]:
            model.set_submodule(name, layer)
    if placeholders:
        undo_after_loading(model, plan, replaced)


def mark_initialized(layer: nn.Module, names: Iterable[str]) -> None:
    """Have transformers find weights that need no initialization where it has codes, until they are loaded.

    Qwen3-Omni initializes its experts from the block around them, by their names, ChineseCLIP a row of its
    embedding, and a model's own code may write to weights that need none: these are nowhere.
    """
    for name in names:
        shape = getattr(layer, "shapes", {}).get(name, 0)
        weight = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        weight._is_hf_initialized = True  # type: ignore[attr-defined]
        layer.__dict__[name] = weight


def unmark_initialized(layer: nn.Module, names: Iterable[str]) -> None:
    """Undo `mark_initialized`."""
    for name in names:
        layer.__dict__.pop(name, None)


def check_factors(model: nn.Module) -> None:
    """Check the matrices' factors that were loaded; shapes and dtypes were checked before.

    Raises:
        ValueError: one is no power of two above zero, as in a damaged file; the message names its weight.
    """
    factors: dict[torch.device, dict[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name in module.shapes if isinstance(module, QuantizedModule) else ():
            factor = getattr(module, name + SCALE).detach()
            factors.setdefault(factor.device, {})[f"{path}.{name}"] = factor.reshape(-1)
    for device, here in factors.items():
        if device.type == "meta":  # offloaded
            continue
        values = torch.cat(list(here.values()))
        wrong = torch.frexp(values).mantissa != 0.5
        if bool(wrong.any()):  # of each device once: it waits
            owners = [name for name, factor in here.items() for _ in range(len(factor))]
            first = int(wrong.nonzero()[0])
            raise ValueError(
                f"{owners[first]}{SCALE} must be a power of two above zero, got {float(values[first])}. "
                f"Fetch the file again."
            )


def plan_ties(model: Any, plan: Plan, refuse: bool) -> Ties:
    """The tied pairs of which one end is quantized.

    Where the other end has no quantized counterpart, neither is quantized.

    Raises:
        ValueError: so, but the checkpoint holds it quantized (`refuse`).
    """
    tied = list(getattr(model, "all_tied_weights_keys", {}).items())
    alone = {} if refuse else left_alone(model)
    dropped: set[str] = set()
    for target, source in tied:
        if target not in plan and source not in plan:
            continue
        for name in (target, source):
            path = holder_of(name)
            reason = unsupported(model.get_submodule(path)) or alone.get(path)
            if reason and refuse:
                raise ValueError(
                    f"{source} is tied to {target} and stored quantized, but {name}: {reason}. "
                    f"Quantize again with modules_to_not_convert=[{module_of(source)!r}]."
                )
            if reason:
                dropped |= {target, source}
    # Three or more may share a weight: all of them stay with the one that cannot be quantized.
    while more := {name for pair in tied if dropped.intersection(pair) for name in pair} - dropped:
        dropped |= more
    for name in dropped:
        plan.pop(name, None)
    return [(target, source) for target, source in tied if target in plan or source in plan]


def place_ties(model: Any, ties: Ties, plan: Plan, policy: QuantizationPolicy) -> None:
    """Replace the other end of each tied pair too, and tell transformers to tie their parts."""
    names = names_of_modules(model)
    for pair in ties:
        planned = plan[pair[1]] if pair[1] in plan else plan[pair[0]]
        for name in pair:
            path = holder_of(name)
            module = model.get_submodule(path)
            if not isinstance(module, QuantizedModule):
                layer = empty_like(module, planned.bits, policy.absmax_format, path, device="meta")
                mark_initialized(layer, layer.shapes)
                for each in names[module]:
                    model.set_submodule(each, layer)
        # Of a source that files lack transformers draws numbers, and ties it to the target only then.
        source = model.get_submodule(holder_of(pair[1]))
        source._is_hf_initialized = getattr(source, "bias", None) is None
    _rename_ties(model, ties, (PACKED, ABSMAX))
    for target, source in ties:
        ends = [model.get_submodule(holder_of(name)) for name in (target, source)]
        if all("weight" in layer._parameters for layer in ends):
            # Files may lack either name, of which transformers then makes a weight unless it is tied.
            for layer in ends:
                layer.allow_spare()
            model.all_tied_weights_keys[target] = source


def _rename_ties(model: Any, ties: Ties, parts: Sequence[str]) -> None:
    """Tied weights are known to transformers by parameter name: replace each by those of its parts."""
    known = dict(model.all_tied_weights_keys)
    declared = getattr(model, "_tied_weights_keys", None)
    declared = dict(declared) if isinstance(declared, dict) else {}
    for target, source in ties:
        for names in (known, declared):
            if names.pop(target, None) is not None or target + PACKED in names:
                names.update({target + part: source + part for part in parts})
    model.all_tied_weights_keys = known
    if ties:
        model._tied_weights_keys = declared


def finish_ties(model: Any, ties: Ties) -> None:
    """After loading: have tied layers share all their parts, factors included.

    Raises:
        ValueError: files that are not safetensors hold the weight under none of its names.
    """
    _drop_spares(model, ties)
    for target, source in ties:
        one, other = (model.get_submodule(holder_of(name)) for name in (source, target))
        if one.weight_packed is not other.weight_packed:
            continue  # the checkpoint had two different ones
        # Whichever of the two the checkpoint holds has the factor, if there is one.
        if "weight_scale" in other._parameters:
            one, other = other, one
        other.share(one)
        if "weight_scale" in one._parameters:
            _rename_ties(model, [(target, source)], (PACKED, ABSMAX, SCALE))


def _drop_spares(model: Any, ties: Ties) -> None:
    """Forget the placeholders of names that the files lack; see `place_ties`."""
    layers = {name: model.get_submodule(holder_of(name)) for pair in ties for name in pair}
    lacking = {name for name, layer in layers.items() if layer.drop_spare()}
    groups: dict[str, set[str]] = {}
    for target, source in ties:
        model.all_tied_weights_keys.pop(target, None)
        groups.setdefault(source, {source}).add(target)
    for names in groups.values():
        if names <= lacking:
            raise ValueError(
                f"the weights hold no tensor {' or '.join(sorted(names))}. Load the model unquantized, "
                f"then call kbit.quantize_model."
            )


def prepare_stored_parts(model: Any, plan: Plan, index: Mapping[str, TensorInfo]) -> None:
    """Compare stored shapes with the model's, and make a parameter of every factor that is stored.

    Raises:
        ValueError: a shape differs.
    """
    for target, planned in plan.items():
        path, _, name = target.rpartition(".")
        module: Any = model.get_submodule(path)
        expected = tuple(getattr(module, name + PACKED).shape)
        if planned.merged:
            expected = (expected[1] // len(planned.sources), expected[2])
        for source in (name for names in planned.sources.values() for name in names):
            info = index[source + PACKED]
            if tuple(info.shape) != expected:
                raise ValueError(
                    f"{info.file}: tensor {source + PACKED!r} has shape {tuple(info.shape)}, the model needs "
                    f"{expected} at {planned.bits} bits. Config and weights are of different models."
                )
        if planned.scaled:
            shape = module.shapes[name][:-2]
            module.set_scale(name, torch.empty(shape, dtype=torch.float32, device="meta"))
