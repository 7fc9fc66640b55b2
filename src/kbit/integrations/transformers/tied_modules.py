"""Which modules of a transformers model share a weight, by all names that a policy may know them by."""

from __future__ import annotations

from typing import Any

from torch import nn

from kbit.format.names import holder_of
from kbit.integrations.transformers.names import modules_in_files
from kbit.nn.support import unsupported

# {parameter: the names of each module that holds it}, as `kbit.format.ties` takes them.
Tied = dict[str, list[tuple[str, ...]]]


def tied_modules(model: Any) -> Tied:
    """The modules of every parameter that has several names, an embedding first.

    Weights are left out of which a holder has no quantized counterpart: those stay as they are.

    Args:
        model: a PreTrainedModel, on the meta device or not, not yet changed.
    """

    def is_table(name: str) -> bool:
        return isinstance(model.get_submodule(holder_of(name)), nn.Embedding)

    groups = _same_weights(model)
    stored = modules_in_files(model) if groups else {}
    found: Tied = {}
    for group in groups:
        if any(unsupported(model.get_submodule(holder_of(name))) for name in group):
            continue
        ordered = sorted(group, key=lambda name: not is_table(name))
        paths = {name: holder_of(name) for name in ordered}
        holders: list[tuple[str, ...]] = [(stored.get(name, path), path) for name, path in paths.items()]
        found.update(dict.fromkeys(group, holders))
    return found


def _same_weights(model: Any) -> list[list[str]]:
    """The names of each parameter that has several, in the model's order.

    Of a model on the meta device ties may be declared only; of others they are there.
    """
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    pairs = [(name, first.setdefault(id(parameter), name)) for name, parameter in state.items()]
    pairs += getattr(model, "all_tied_weights_keys", {}).items()
    groups: dict[str, set[str]] = {}
    for pair in pairs:
        joined = set().union(*(groups.get(name, {name}) for name in pair))
        groups.update(dict.fromkeys(joined, joined))
    weights = {id(group): group for group in groups.values() if len(group) > 1 and group <= state.keys()}
    return [[name for name in state if name in group] for group in weights.values()]
