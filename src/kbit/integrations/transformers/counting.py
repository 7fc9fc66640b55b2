"""`num_parameters` of models with quantized layers: their weights, not the words that hold their codes."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from torch import nn

from kbit.format.names import PACKED
from kbit.integrations.on_import import wrap_method
from kbit.nn.parts import QuantizedModule
from kbit.nvfp4.layers import NVFP4Module

_QUANTIZED = QuantizedModule, NVFP4Module


def guard_counting(module: ModuleType) -> None:
    """Have transformers count weights of quantized layers as it counts those of others; tied ones once.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "num_parameters", _counted)


def _counted(original: Any) -> Any:
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        quantized = any(isinstance(module, _QUANTIZED) for module in self.modules())
        if only_trainable or not quantized:  # no quantized weight is trained
            count: int = original(self, only_trainable, exclude_embeddings)
            return count
        return _count(self, exclude_embeddings)

    return num_parameters


def _count(model: Any, exclude_embeddings: bool) -> int:
    seen: set[Any] = set()
    count = 0
    for module in model.modules():
        shapes = module.shapes if isinstance(module, _QUANTIZED) else {}
        of_weights = tuple(f"{name}_" for name in shapes)
        sizes = {
            module._parameters.get(name + PACKED, (module, name)): math.prod(shape)
            for name, shape in shapes.items()
        }
        for name, parameter in module._parameters.items():
            if parameter is not None and not (of_weights and name.startswith(of_weights)):
                sizes[parameter] = parameter.numel()
        if not (exclude_embeddings and isinstance(module, nn.Embedding)):
            count += sum(size for one, size in sizes.items() if one not in seen)
        seen |= sizes.keys()
    return count
