"""`num_parameters` of models with quantized layers: their weights, not the words that hold their codes."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from torch import nn

from kbit.integrations.on_import import wrap_method
from kbit.nn.tied import distinct_weights
from kbit.nn.tiling import TileableModule


def guard_counting(module: ModuleType) -> None:
    """Have transformers count weights of quantized layers as it counts those of others; tied ones once.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "num_parameters", _counted)


def _counted(original: Any) -> Any:
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        quantized = any(isinstance(module, TileableModule) for module in self.modules())
        if only_trainable or not quantized:  # no quantized weight is trained
            count: int = original(self, only_trainable, exclude_embeddings)
            return count
        return _count(self, exclude_embeddings)

    return num_parameters


def _count(model: Any, exclude_embeddings: bool) -> int:
    def counts(module: nn.Module) -> bool:
        return not (exclude_embeddings and isinstance(module, nn.Embedding))

    quantized = distinct_weights(model)
    count = sum(math.prod(module.shapes[weight]) for _, module, weight in quantized if counts(module))
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        parts = tuple(f"{name}_" for name in module.shapes) if isinstance(module, TileableModule) else ()
        own = {
            parameter
            for name, parameter in module._parameters.items()
            if parameter is not None and not name.startswith(parts)
        }
        if counts(module):
            count += sum(parameter.numel() for parameter in own - seen)
        seen |= own
    return count
