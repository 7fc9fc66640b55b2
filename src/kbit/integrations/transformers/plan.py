"""Which parameters of a transformers model are quantized, decided from the names in the checkpoint.

transformers renames and fuses checkpoint tensors into parameters. The plan translates: for each parameter of
the model, its width and the checkpoint tensors that it comes from. Quantizing on load and `kbit quantize` on
the files follow it, and so does loading what either has written.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import nn
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, dot_natural_key

from kbit.format.names import PACKED, SCALE, holder_of, is_candidate, module_of, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import TensorInfo
from kbit.format.ties import contradictions, width_of
from kbit.format.unmatched import unmatched
from kbit.integrations.transformers import stored_ties
from kbit.integrations.transformers.names import (
    Transforms,
    loading_transforms,
    modules_in_files,
    parameter_of,
)
from kbit.integrations.transformers.refusals import refuse_missing, refuse_unlike
from kbit.integrations.transformers.tied_modules import Tied, tied_modules
from kbit.nn.fused_experts import WEIGHTS
from kbit.nn.support import left_alone, refuse_mixed, unsupported


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
        model: a PreTrainedModel on the meta device, not yet changed. What its files show to be two weights
            is taken out of its ties.
        policy: the decision rule. It is asked with the module's name in the checkpoint and that in the model;
            for a quantized checkpoint with the former alone, which its config speaks of.
        index: the checkpoint's tensors; None if unknown, then the model's are taken.
        pre_quantized: whether the checkpoint holds quantized tensors.

    Returns:
        {parameter name: Planned}.

    Raises:
        ValueError: tensors of one parameter, or the names of one module, would get different widths; or the
            checkpoint holds quantized what this model cannot run quantized, or lacks what its config says to
            be quantized.

    Warns:
        UserWarning: an override or a skip matches no module, or an override is for a tied weight that has
            other bits.
    """
    transforms = loading_transforms(model)
    routes = _routes(model, index, pre_quantized, transforms)
    if index is not None:
        stored_ties.forget_broken(model, policy, index, routes)
    tied = {} if pre_quantized else _tied_by_routes(model, routes, index is not None)
    if not pre_quantized:
        _warn_about_names(model, policy, routes, tied, index is not None)
    plan: Plan = {}
    stored = index or {}
    plain = {
        route.target: route.name for route in routes if pre_quantized and route.name + PACKED not in stored
    }
    widths: dict[str, dict[int, str]] = {}
    for route in routes:
        name, target, pattern, _ = route
        bits = None if pre_quantized and name + PACKED not in stored else _width(policy, route, tied)
        if bits is None:
            continue
        planned = plan.setdefault(target, Planned(bits, merged=pattern is not None))
        widths.setdefault(target, {})[bits] = name
        planned.sources.setdefault(pattern or name, []).append(name)
        if name + SCALE in stored:
            planned.scaled.add(name)
    for source, (name, target, *_) in [*stored_ties.copies(model, plan, routes)]:
        plan[target] = Planned(plan[source].bits, {name: [name]})
        widths[target] = {plan[source].bits: name}
    _drop_unsupported(model, plan, transforms[1], plain if pre_quantized else None)
    together: dict[str, dict[int, str]] = {}
    for target in plan:
        together.setdefault(holder_of(target), {}).update(widths[target])
    refuse_mixed(together)
    if pre_quantized:
        arrived = {name: (target, pattern) for name, target, pattern, _ in routes}
        refuse_missing(model, policy, stored, arrived, transforms)
    if index is not None:
        refuse_unlike(
            model, {target: plan[target].bits if target in plan else None for _, target, *_ in routes}
        )
    return plan


def _routes(
    model: Any, index: Mapping[str, TensorInfo] | None, pre_quantized: bool, transforms: Transforms
) -> list[Route]:
    """The routes of all tensors that are quantized, or can be by their names and shapes."""
    state = model.state_dict()
    tensors: Mapping[str, Any] = state if index is None else index
    shapes = {name: tensor.shape for name, tensor in tensors.items() if original_of(name) == name}
    names = list(shapes)
    if pre_quantized:
        names += [original_of(name) for name in tensors if name.endswith(PACKED)]
    stored = modules_in_files(model) if index is None else {}
    routes = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = parameter_of(name, transforms, model.base_model_prefix, state)
        if target not in state:
            continue  # a tensor this class of model does not use, such as a prediction head
        if pattern is not None and name + PACKED in tensors:
            # transformers may convert whole weights and leave parts alone: then they are the parameter's own.
            direct = target + PACKED
            found = parameter_of(name + PACKED, transforms, model.base_model_prefix, {**state, direct: None})
            pattern = None if found == (direct, None) else pattern
        # The name in the file does not always tell experts: Granite has block_sparse_moe.input_linear.weight.
        shape = shapes.get(name)
        if shape is not None and not is_candidate(name, shape) and not is_candidate(target, shape):
            continue
        alone = pattern is None and not pre_quantized
        if alone and shape is not None and math.prod(shape) != state[target].numel():
            continue  # transformers refuses it, or draws another
        module, own = module_of(name), module_of(target)
        modules = (module,) if pre_quantized else (stored.get(name, module), own)
        routes.append(Route(name, target, pattern, modules))
    return routes


def _width(policy: QuantizationPolicy, route: Route, tied: Tied) -> int | None:
    """The width of a tensor; of a weight that modules share, what they get together."""
    return width_of(policy, tied.get(route.target, [route.modules]))


def _tied_by_routes(model: Any, routes: Iterable[Route], of_files: bool) -> Tied:
    """The modules that share each routed parameter, the one whose name decides first.

    That is the embedding; but where files hold tensors of several, which are equal then, each is its own:
    of two widths they are two weights.
    """
    own = {route.target: route.modules for route in routes}
    paths = {holder_of(target) for target in own} if of_files else set()
    found = {}
    for target, holders in tied_modules(model).items():
        if target in own:
            path = holder_of(target)
            known = [own[target] if names[-1] == path else names for names in holders]
            apart = holders[0][-1] in paths
            found[target] = sorted(known, key=lambda names: names is not own[target]) if apart else known
    return found


def _warn_about_names(
    model: Any, policy: QuantizationPolicy, routes: Iterable[Route], tied: Tied, of_files: bool
) -> None:
    quantizable: dict[str, None] = {}
    others = dict.fromkeys(name for name, _ in model.named_modules())
    owners = dict.fromkeys((holder_of(route.target), route.modules) for route in routes)
    for path, names in owners:  # of experts stored one by one there are hundreds of routes to each
        supported = unsupported(model.get_submodule(path)) is None
        (quantizable if supported else others).update(dict.fromkeys(names))
    # A module with a tensor of its own in the files answers for itself.
    apart = {path for path, _ in owners} if of_files else set()
    weights = [[first, *(one for one in rest if one[-1] not in apart)] for first, *rest in tied.values()]
    sharing = {name for _, *rest in weights for names in rest for name in names}
    for found in (unmatched(policy, quantizable, others, sharing), contradictions(policy, weights)):
        if found:
            warnings.warn(found, stacklevel=3)


def is_expert_merge(converter: WeightConverter) -> bool:
    """Whether a converter stacks experts, and puts gate above up: what can be done on codes."""
    operations = converter.operations
    stacks = bool(operations) and type(operations[0]) is MergeModulelist and operations[0].dim == 0
    if len(converter.source_patterns) == 1:
        return stacks and len(operations) == 1
    joins = len(operations) == 2 and type(operations[1]) is Concatenate and operations[1].dim == 1
    return stacks and joins


def _drop_unsupported(
    model: Any, plan: Plan, converters: Iterable[WeightConverter], plain: Mapping[str, str] | None
) -> None:
    """Leave out, or for a quantized checkpoint refuse, parameters that have no quantized counterpart.

    Args:
        model, plan: see `build_plan`.
        converters: see `loading_transforms`.
        plain: of a quantized checkpoint {parameter: one of its tensors that is stored unquantized}, or None.
    """
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    alone = left_alone(model) if plain is None else {}
    for target in list(plan):
        if target not in plan:
            continue
        owner = module_of(target)
        reason = alone.get(holder_of(target)) or _obstacle(model, target, plan, by_pattern)
        gap = None if reason else _gap(model, target, plan, by_pattern)
        if reason and plain is not None:
            raise ValueError(
                f"{target}: the checkpoint holds it quantized, but {reason}. Quantize again with "
                f"modules_to_not_convert=[{owner!r}]."
            )
        if gap and plain is not None:
            beside = next((name for other, name in plain.items() if module_of(other) == owner), None)
            remedy = f"{beside} is stored unquantized:" if beside else "Fetch the checkpoint again, or"
            raise ValueError(
                f"{target}: the checkpoint holds it quantized, but not whole: {gap}. {remedy} quantize the "
                f"model again, with one width for all of {owner}."
            )
        if reason or gap:
            for other in [name for name in plan if module_of(name) == owner]:
                del plan[other]


def _obstacle(model: Any, target: str, plan: Plan, by_pattern: Mapping[str, WeightConverter]) -> str | None:
    """Why a parameter cannot be held quantized, however whole its tensors are."""
    module = model.get_submodule(holder_of(target))
    reason = unsupported(module)
    if reason or not plan[target].merged:
        return reason
    converter = by_pattern[next(iter(plan[target].sources))]
    if isinstance(module, nn.Linear | nn.Embedding) or not is_expert_merge(converter):
        return "transformers converts it from tensors of another layout"
    return None


def _gap(model: Any, target: str, plan: Plan, by_pattern: Mapping[str, WeightConverter]) -> str | None:
    """Which tensors of fused experts are not quantized, or not there."""
    path, planned = holder_of(target), plan[target]
    module = model.get_submodule(path)
    if isinstance(module, nn.Linear | nn.Embedding):
        return None
    if planned.merged:
        patterns = by_pattern[next(iter(planned.sources))].source_patterns
        if sorted(planned.sources) != sorted(patterns):
            return f"of {sorted(patterns)} only {sorted(planned.sources)} are quantized"
        counts = {pattern: len(names) for pattern, names in planned.sources.items()}
        if set(counts.values()) != {module.num_experts}:
            return f"it has {module.num_experts} experts and the checkpoint {counts}"
    for name in WEIGHTS:
        if f"{path}.{name}" not in plan:
            return f"{path}.{name} is not quantized"
    return None
