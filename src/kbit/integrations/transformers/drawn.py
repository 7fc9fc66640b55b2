"""Layers of which the weights turn out to hold nothing: transformers draws them, so they stay unquantized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from kbit.format.names import ABSMAX, PACKED, original_of
from kbit.format.reference import blocks_of
from kbit.integrations.transformers.plan import Plan
from kbit.integrations.transformers.sections import refuse_codes
from kbit.nn.support import names_of_modules


def undo_after_loading(model: Any, plan: Plan, replaced: Mapping[str, nn.Module]) -> None:
    """Put back modules that nothing was loaded for, after transformers loads weights and before it draws any.

    What pickled weights and a state dict hold is known only then. The method that transformers calls in
    between stands for it, once, and is called in its turn.

    Args:
        model: with empty quantized layers, whose placeholders have the names of unquantized weights.
        plan: from which the layers are removed.
        replaced: the modules that the layers stand for, by path.

    Raises:
        ValueError: later, while the model is loaded: a weight has another shape than its layer, or is codes.
    """

    def marking(info: Any) -> None:
        del vars(model)["mark_tied_weights_as_initialized"]
        refuse_codes(model, info.unexpected_keys)
        _refuse_other_shapes(model, replaced, info)
        _put_back(model, plan, replaced, info)
        model.mark_tied_weights_as_initialized(info)

    vars(model)["mark_tied_weights_as_initialized"] = marking


def _refuse_other_shapes(model: Any, replaced: Mapping[str, nn.Module], info: Any) -> None:
    """Refuse what `ignore_mismatched_sizes` would leave as codes that nobody wrote, or of another size.

    Raises:
        ValueError: a weight has another shape; the message names the first.
    """
    told = {key for key, *_ in info.mismatched_keys}
    for path in replaced:
        layer: Any = model.get_submodule(path)
        for name, (*rows, columns) in layer.shapes.items():
            absmax = layer._parameters.get(name + ABSMAX)
            plain = type(absmax) is nn.Parameter  # else it is split over ranks
            other = plain and absmax.shape != (*rows, blocks_of(columns))
            if other or f"{path}.{name}{PACKED}" in told:
                raise ValueError(
                    f"the weights hold {path}.{name} in another shape than the layer's. To have it drawn at "
                    f"random, leave it unquantized: modules_to_not_convert=[{path!r}]."
                )


def _put_back(model: Any, plan: Plan, replaced: Mapping[str, nn.Module], info: Any) -> None:
    """Have layers unquantized of which no weight was loaded; of tied ones see `placement.finish_ties`."""
    names = names_of_modules(model)
    tied = {original_of(name) for pair in model.all_tied_weights_keys.items() for name in pair}
    for path, module in replaced.items():
        layer: Any = model.get_submodule(path)
        lacking = {f"{path}.{name}" for name in layer.shapes if name in layer._parameters}
        if not lacking or lacking & tied:
            continue
        parts = layer.give_back(module)
        for name in names[layer]:
            for weight in layer.shapes:
                plan.pop(f"{name}.{weight}", None)
            info.missing_keys -= {f"{name}.{part}" for part in parts}
            model.set_submodule(name, module)
