"""Which parameters of a transformers model are quantized, decided from the names in the checkpoint.

transformers renames and fuses checkpoint tensors into parameters. The plan translates: for each parameter of
the model, its width and the checkpoint tensors that it comes from. Quantizing on load and `kbit quantize` on
the files follow it, and so does loading what either has written.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kbit.format.checkpoint import TensorInfo
from kbit.format.names import PACKED, SCALE, is_candidate, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.unmatched import unmatched
from kbit.integrations.transformers.names import names_in_files
from kbit.nn.support import left_alone, unsupported


@dataclass
class Planned:
    """A parameter of the model that is held quantized.

    Attributes:
        bits: its width.
        sources: {converter pattern, or the tensor's own name: names of checkpoint tensors, in order}.
        merged: whether transformers fuses several tensors into it (experts stored one by one).
        scaled: names among the sources that have a stored `_scale`.
    """

    bits: int
    sources: dict[str, list[str]] = field(default_factory=dict)
    merged: bool = False
    scaled: set[str] = field(default_factory=set)


Plan = dict[str, Planned]


class Route(NamedTuple):
    """Where a tensor of a checkpoint goes.

    Attributes:
        name: the tensor's, without the suffix of a part.
        target: the model's parameter.
        pattern: of the converter that fuses it with others; None if it is a parameter by itself.
        modules: the names of its module that a policy is asked with.
    """

    name: str
    target: str
    pattern: str | None
    modules: tuple[str, ...]


def build_plan(
    model: Any, policy: QuantizationPolicy, index: Mapping[str, TensorInfo] | None, pre_quantized: bool
) -> Plan:
    """Decide about every parameter of a model.

    Args:
        model: a PreTrainedModel on the meta device, not yet changed.
        policy: the decision rule. It is asked with the module's name in the checkpoint and that in the model;
            for a quantized checkpoint with the former alone, which its config speaks of.
        index: the checkpoint's tensors; None if unknown, then the model's are taken.
        pre_quantized: whether the checkpoint holds quantized tensors.

    Returns:
        {parameter name: Planned}.

    Raises:
        ValueError: tensors of one parameter, or the names of one module, would get different widths; or the
            checkpoint holds quantized what this model cannot run quantized.

    Warns:
        UserWarning: an override or a skip matches no module.
    """
    transforms = _transforms(model)
    routes = _routes(model, index, pre_quantized, transforms)
    if not pre_quantized:
        _warn_about_unmatched(model, policy, routes)
    plan: Plan = {}
    stored = index or {}
    for name, target, pattern, modules in routes:
        plain = pre_quantized and name + PACKED not in stored
        bits = None if plain else policy.bits_for(*modules)
        if bits is None:
            continue
        planned = plan.setdefault(target, Planned(bits, merged=pattern is not None))
        if planned.bits != bits:
            raise ValueError(
                f"{target}: its tensors would get {planned.bits} and {bits} bits ({name}). Change overrides "
                f"to treat them alike."
            )
        planned.sources.setdefault(pattern or name, []).append(name)
        if name + SCALE in stored:
            planned.scaled.add(name)
    _drop_unsupported(model, plan, transforms[1], pre_quantized)
    if index is not None:
        _refuse_unlike(
            model, {target: plan[target].bits if target in plan else None for _, target, *_ in routes}
        )
    return plan


def _routes(
    model: Any, index: Mapping[str, TensorInfo] | None, pre_quantized: bool, transforms: Any
) -> list[Route]:
    """Of all tensors that are quantized, or can be by their names and shapes."""
    state = model.state_dict()
    tensors: Mapping[str, Any] = state if index is None else index
    names = [
        name
        for name, tensor in tensors.items()
        if original_of(name) == name and is_candidate(name, tensor.shape)
    ]
    if pre_quantized:
        names += [original_of(name) for name in tensors if name.endswith(PACKED)]
    stored = names_in_files(model) if index is None else {}
    routes = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = _target(name, transforms, model.base_model_prefix, state)
        if target not in state:
            continue  # a tensor this class of model does not use, such as a prediction head
        module, own = module_of(name), module_of(target)
        modules = (module,) if pre_quantized else (stored.get(module, module), own)
        routes.append(Route(name, target, pattern, modules))
    return routes


def _warn_about_unmatched(model: Any, policy: QuantizationPolicy, routes: Iterable[Route]) -> None:
    quantizable: dict[str, None] = {}
    others = dict.fromkeys(name for name, _ in model.named_modules())
    owners = dict.fromkeys((route.target.rpartition(".")[0], route.modules) for route in routes)
    for path, names in owners:  # of experts stored one by one there are hundreds of routes to each
        supported = unsupported(model.get_submodule(path)) is None
        (quantizable if supported else others).update(dict.fromkeys(names))
    found = unmatched(policy, quantizable, others)
    if found:
        warnings.warn(found, stacklevel=2)


def _transforms(model: Any) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    return renamings, [entry for entry in conversions if isinstance(entry, WeightConverter)]


def _target(name: str, transforms: Any, prefix: str, state: Mapping[str, Any]) -> tuple[str, str | None]:
    """The model's parameter that a checkpoint tensor goes to, as transformers' loader finds it."""
    target, pattern = rename_source_key(name, *transforms, prefix, state)
    if target not in state and name in state:
        return rename_source_key(name, [], [], prefix, state)
    return target, pattern


def is_expert_merge(converter: WeightConverter) -> bool:
    """Whether a converter stacks experts, and puts gate above up: what can be done on codes."""
    operations = converter.operations
    stacks = bool(operations) and type(operations[0]) is MergeModulelist and operations[0].dim == 0
    if len(converter.source_patterns) == 1:
        return stacks and len(operations) == 1
    joins = len(operations) == 2 and type(operations[1]) is Concatenate and operations[1].dim == 1
    return stacks and joins


def _drop_unsupported(
    model: Any, plan: Plan, converters: Iterable[WeightConverter], pre_quantized: bool
) -> None:
    """Leave out, or for a quantized checkpoint refuse, parameters that have no quantized counterpart."""
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    alone = {} if pre_quantized else left_alone(model)
    for target in list(plan):
        if target not in plan:
            continue
        reason = alone.get(target.rpartition(".")[0]) or _obstacle(model, target, plan, by_pattern)
        if reason is None:
            continue
        if pre_quantized:
            raise ValueError(
                f"{target}: the checkpoint holds it quantized, but {reason}. Quantize again with "
                f"modules_to_not_convert=[{module_of(target)!r}]."
            )
        owner = module_of(target)
        for other in [name for name in plan if module_of(name) == owner]:
            del plan[other]


def _obstacle(model: Any, target: str, plan: Plan, by_pattern: Mapping[str, WeightConverter]) -> str | None:
    module = model.get_submodule(target.rpartition(".")[0])
    reason = unsupported(module)
    if reason:
        return reason
    planned = plan[target]
    is_experts = not isinstance(module, nn.Linear | nn.Embedding)
    if planned.merged:
        converter = by_pattern[next(iter(planned.sources))]
        if not is_experts or not is_expert_merge(converter):
            return "transformers converts it from tensors of another layout"
        if sorted(planned.sources) != sorted(converter.source_patterns):
            return f"the checkpoint has only {sorted(planned.sources)} of it"
        wrong = {pattern: len(names) for pattern, names in planned.sources.items()}
        if set(wrong.values()) != {module.num_experts}:
            return f"it has {module.num_experts} experts and the checkpoint {wrong}"
    if is_experts:
        for name in ("gate_up_proj", "down_proj"):
            if f"{target.rpartition('.')[0]}.{name}" not in plan:
                return f"its {name} is not"
    return None


def _refuse_unlike(model: Any, stored: Mapping[str, int | None]) -> None:
    """Refuse what the checkpoint has by several names and the policy does not treat alike.

    Of tied weights only what cannot be held is refused: a quantized weight tied to one that is not. The other
    way round the latter is left out, and of two widths transformers ties nothing and says so.

    Args:
        model: see `build_plan`.
        stored: {parameter name: its width, None if it stays unquantized}.
    """
    modules: dict[nn.Module, dict[str, int | None]] = {}
    for target, bits in stored.items():
        path = target.rpartition(".")[0]
        modules.setdefault(model.get_submodule(path), {})[path] = bits
    for widths in modules.values():
        if len(set(widths.values())) > 1:
            raise _unlike(widths, "are one module")
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        unquantized = source in stored and stored[source] is None
        paths = [name.rpartition(".")[0] for name in (target, source)]
        if stored.get(target) and unquantized and not unsupported(model.get_submodule(paths[1])):
            raise _unlike(dict(zip(paths, (stored[target], None), strict=True)), "are tied")


def _unlike(widths: Mapping[str, int | None], relation: str) -> ValueError:
    names = [f"{name} ({f'{bits} bits' if bits else 'unquantized'})" for name, bits in widths.items()]
    return ValueError(
        f"{' and '.join(names)} {relation}, so they must be quantized alike. Change overrides or "
        f"modules_to_not_convert to treat them alike; a quantized checkpoint has to be quantized again."
    )
