"""Layers with one weight between them: an embedding and the output head that is tied to it.

Both have the canonical form, of which the embedding reads rows. A head that a GPU multiplies has tiles
beside it: decoding the whole weight for every token would take longer than reading it in 16 bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kbit.format.names import PACKED, SCALE
from kbit.format.versions import version_of
from kbit.nn.tiling import TileableModule, lock, wait_for

if TYPE_CHECKING:
    from kbit.nn.parts import QuantizedModule


# Of a layer: from which parts its tiles were made, and these.
_beside: weakref.WeakKeyDictionary[Any, tuple[Any, torch.Tensor]] = weakref.WeakKeyDictionary()


def tiles_beside(layer: QuantizedModule, name: str) -> torch.Tensor | None:
    """Tiles of a weight that stays canonical, made where there are none, or of other codes.

    Those of other codes are written in place, where a CUDA graph reads them. Codes that are written past
    PyTorch's count of changes are not seen: `forget_tiles`.

    Returns:
        None where no kernel multiplies tiles, and where none can be made: torch.compile traces the call, or a
        CUDA graph records it.
    """
    if torch.compiler.is_compiling():
        return None
    parts = layer._plain_parts(name)
    if parts is None or not layer._tiles_pay(parts[0].device) or layer._offloaded():
        return None
    key = tuple((part.data_ptr(), version_of(part), part.device) for part in parts)
    made, tiles = _beside.get(layer, (None, None))
    if made == key:
        return tiles
    capturing = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or parts[1].dtype != torch.uint8:
        return None
    with lock, torch.inference_mode(False), torch.no_grad():
        new = layer._to_tiles(name, *(part.detach() for part in parts))
        if tiles is not None and (tiles.shape, tiles.device) == (new.shape, new.device):
            new = tiles.copy_(new)
        wait_for(new.device)
        _beside[layer] = key, new
    return new


def forget_tiles(model: nn.Module) -> None:
    """Drop what `tiles_beside` made for a model's layers; calls to come make it anew."""
    for module in model.modules():
        _beside.pop(module, None)


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
    were loaded. A file may hold tied tensors under one name only. Factors of 1 that both have already stay
    where they are: moved to a GPU each has its own, and a CUDA graph may have recorded both addresses.

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
            if name + SCALE in layer._buffers and name + SCALE in other._buffers:
                continue
            mine = prefix + name + PACKED in stored
            take(*((other, layer) if mine else (layer, other)), [name + SCALE])
