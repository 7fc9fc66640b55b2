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
        if not any(isinstance(module, TileableModule) for module in self.modules()):
            count: int = original(self, only_trainable, exclude_embeddings)
            return count
        return _count(self, only_trainable, exclude_embeddings)

    return num_parameters


def _count(model: Any, only_trainable: bool, exclude_embeddings: bool) -> int:
    def counts(module: nn.Module) -> bool:
        return not (exclude_embeddings and isinstance(module, nn.Embedding))

    quantized = () if only_trainable else distinct_weights(model)  # no quantized weight is trained
    count = sum(math.prod(whole_shape(module, weight)) for _, module, weight in quantized if counts(module))
    seen: set[nn.Parameter] = set()
    for module in model.modules():
        parts = tuple(f"{name}_" for name in module.shapes) if isinstance(module, TileableModule) else ()
        own = {
            parameter: name
            for name, parameter in module._parameters.items()
            if parameter is not None and not name.startswith(parts)
        }
        if counts(module):
            wanted = (one for one in own if one not in seen and (one.requires_grad or not only_trainable))
            count += sum(_size(module, own[parameter], parameter) for parameter in wanted)
        seen |= own.keys()
    return count


def whole_shape(module: Any, weight: str) -> tuple[int, ...]:
    """Of a quantized weight, over all ranks that have parts of it."""
    shape: tuple[int, ...] = module.whole_shape(weight) if hasattr(module, "split") else module.shapes[weight]
    return shape


def _size(module: Any, name: str, parameter: nn.Parameter) -> int:
    """Elements of a parameter, over all ranks where a quantized layer holds a part; DTensors say so."""
    split = getattr(module, "split", None) if isinstance(module, TileableModule) else None
    return parameter.numel() if split is None else math.prod(split.shapes.get(name, parameter.shape))
