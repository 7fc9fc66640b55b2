"""Layers with one weight between them: an embedding and the output head that is tied to it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

from torch import nn

from kbit.format.names import PACKED, SCALE
from kbit.nn.tiling import TileableModule

if TYPE_CHECKING:
    from kbit.nn.parts import QuantizedModule


def distinct_weights(model: nn.Module) -> Iterator[tuple[str, TileableModule, str]]:
    """(name, module, weight) of all quantized weights of a model; of tied ones the first."""
    seen = set()
    for name, module in model.named_modules():
        for weight in module.shapes if isinstance(module, TileableModule) else ():
            packed = module._parameters.get(weight + PACKED)  # which tied ones have together
            if packed is None or packed not in seen:
                seen.add(packed)
                yield name, module, weight


def take(layer: QuantizedModule, other: QuantizedModule, keys: Iterable[str]) -> None:
    """Make parts of `layer`, such as "weight_packed", the very ones of `other`."""
    for key in keys:
        layer._parameters.pop(key, None)
        layer._buffers.pop(key, None)
        if key in other._parameters:
            layer._parameters[key] = other._parameters[key]
        else:
            layer.register_buffer(key, other._buffers[key], persistent=False)


def agree_on_factors(layer: QuantizedModule, stored: Container[str], prefix: str) -> None:
    """After a layer was loaded, give it and the one that it is tied to the factors of the same of them.

    Codes are written in place, so both have them; factors become a parameter, or cease to be one, where they
    were loaded. A file may hold tied tensors under one name only.

    Args:
        layer: a layer.
        stored: names in the state dict.
        prefix: of this layer's.
    """
    for other in layer.tied_to:
        for name in layer.shapes:
            codes = layer._parameters.get(name + PACKED)
            if codes is None or codes is not other._parameters.get(name + PACKED):
                continue  # not tied any more
            mine = prefix + name + PACKED in stored
            take(*((other, layer) if mine else (layer, other)), [name + SCALE])
