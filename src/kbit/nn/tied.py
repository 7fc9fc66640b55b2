"""Layers with one weight between them: an embedding and the output head that is tied to it."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from kbit.format.names import PACKED, SCALE

if TYPE_CHECKING:
    from kbit.nn.parts import QuantizedModule


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
