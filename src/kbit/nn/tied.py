"""Layers with one weight between them: an embedding and the output head that is tied to it.

Both have the canonical form, of which the embedding reads rows. A head that a GPU multiplies has tiles
beside it: decoding the whole weight for every token would take longer than reading it in 16 bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from kbit.format.names import PACKED, SCALE
from kbit.format.versions import version_of
from kbit.nn.tiling import TileableModule, lock, wait_for

if TYPE_CHECKING:
    from kbit.nn.parts import QuantizedModule


class _Beside(NamedTuple):
    """Tiles beside a weight, and of which parts they were made, where these lay, and at which version."""

    parts: tuple[weakref.ref[nn.Parameter], ...]
    seen: tuple[Any, ...]
    tiles: torch.Tensor

    def are_of(self, parts: Sequence[nn.Parameter]) -> bool:
        same = all(known() is part for known, part in zip(self.parts, parts, strict=True))
        return same and self.seen == _seen(parts)


_beside: weakref.WeakKeyDictionary[Any, _Beside] = weakref.WeakKeyDictionary()
# Of a layer, those that took its weight: `tied_to` the other way around.
_sharers: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def _seen(parts: Sequence[nn.Parameter]) -> tuple[Any, ...]:
    return tuple((part.data_ptr(), version_of(part), part.device) for part in parts)


def tiles_beside(layer: QuantizedModule, name: str = "weight", loaded: bool = False) -> torch.Tensor | None:
    """Tiles of a weight that stays canonical, made where there are none, or of other codes.

    Those of other codes are written in place, where a CUDA graph reads them. Codes that are written past
    PyTorch's count of changes are not seen: `renew_tiles`.

    Args:
        layer, name: whose.
        loaded: whether codes were just written, which of tensors made in inference mode nothing tells.

    Returns:
        None where no kernel multiplies tiles, and where none can be made: torch.compile traces the call, or a
        CUDA graph records it.
    """
    if torch.compiler.is_compiling():
        return None
    parts = layer._plain_parts(name)
    if parts is None or not layer._tiles_pay(parts[0].device) or layer._offloaded():
        return None
    again = loaded and any(part.is_inference() for part in parts)
    known = _beside.get(layer)
    if known is not None and not again and known.are_of(parts):
        return known.tiles
    capturing = parts[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or parts[1].dtype != torch.uint8:
        return None
    with lock, torch.inference_mode(False), torch.no_grad():
        known = _beside.get(layer)
        if known is not None and not again and known.are_of(parts):
            return known.tiles  # another thread was faster
        tiles = layer._to_tiles(name, *(part.detach() for part in parts))
        if known is not None and (known.tiles.shape, known.tiles.device) == (tiles.shape, tiles.device):
            tiles = known.tiles.copy_(tiles)
        wait_for(tiles.device)
        _beside[layer] = _Beside(tuple(map(weakref.ref, parts)), _seen(parts), tiles)
    return tiles


def renew_tiles(model: nn.Module, written: bool = False) -> None:
    """Have what `tiles_beside` made for a model's layers be of their codes, in place.

    Args:
        model: any.
        written: whether codes may have been written past PyTorch's count of changes.
    """
    for module in model.modules() if _beside else ():
        if (known := _beside.get(module)) is not None:
            if written:
                _beside[module] = known._replace(seen=())
            tiles_beside(module)  # type: ignore[arg-type]


def forget_moved(layer: QuantizedModule) -> None:
    """Drop a layer's tiles where its weight is on another device now: it may come back as other codes."""
    known = _beside.get(layer)
    if known is not None and any(
        (part := of()) is None or part.device != known.tiles.device for of in known.parts
    ):
        _beside.pop(layer, None)


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


def share(layer: QuantizedModule, other: QuantizedModule, keys: Iterable[str]) -> None:
    """`take`, for good: whatever is loaded into `other` is of `layer`, too."""
    take(layer, other, keys)
    layer.tied_to = (other,)
    other.tied_to = tuple(one for one in other.tied_to if one is not layer)
    know_each_other(layer)


def know_each_other(layer: QuantizedModule) -> None:
    """Have the layers that a new one is tied to, such as a copy, know of it."""
    for other in layer.tied_to:
        _sharers.setdefault(other, weakref.WeakSet()).add(layer)


def after_loading(layer: QuantizedModule, stored: Container[str], prefix: str) -> None:
    """After a layer was loaded, have those that it is tied to, and CUDA graphs of their tiles, go on with it.

    Args:
        layer: a layer.
        stored: names in the state dict.
        prefix: of this layer's.
    """
    others = (*layer.tied_to, *_sharers.get(layer, ()))
    _agree_on_factors(layer, others, stored, prefix)
    for other in others:
        if other in _beside:
            tiles_beside(other, loaded=True)


def _agree_on_factors(
    layer: QuantizedModule, others: Iterable[QuantizedModule], stored: Container[str], prefix: str
) -> None:
    """Give tied layers the factors of the same of them.

    Codes are written in place, so both have them; factors become a parameter, or cease to be one, where they
    were loaded. A file may hold tied tensors under one name only. Factors of 1 that both have already stay
    where they are: moved to a GPU each has its own, and a CUDA graph may have recorded both addresses. A
    graph of one's own has to be recorded anew where a factor was 1 and is not, or the other way around.
    """
    for other in others:
        for name in layer.shapes:
            codes = layer._parameters.get(name + PACKED)
            if codes is None or codes is not other._parameters.get(name + PACKED):
                continue  # not tied any more
            if name + SCALE in layer._buffers and name + SCALE in other._buffers:
                continue
            mine = prefix + name + PACKED in stored
            take(*((other, layer) if mine else (layer, other)), [name + SCALE])
