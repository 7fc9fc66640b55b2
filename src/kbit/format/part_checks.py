"""Checks of the parts of a quantized weight. They read no data, so eager and traced calls make the same."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kbit.format import reference
from kbit.format.codebook import SUPPORTED_BITS, check_bits
from kbit.format.layout import check_tile_shape
from kbit.format.scales import ABSMAX_FORMATS
from kbit.format.words import dtype_name

_WIDTHS = {2**bits: bits for bits in SUPPORTED_BITS}  # by the number of levels


def sizes_of(shape: Iterable[Any], kind: str = "quantized tensor") -> tuple[int, ...]:
    """A weight's shape as a tuple.

    Args:
        shape: (N, K) or (E, N, K).
        kind: what has it, for messages.

    Raises:
        TypeError: these are no sizes.
        ValueError: there are not two or three, K is less than 1, or another is negative.
    """
    try:
        # While a call is traced, sizes may be symbols, which an index would make numbers of.
        sizes: tuple[Any, ...] = tuple(
            size if isinstance(size, int | torch.SymInt) else operator.index(size) for size in shape
        )
    except TypeError:
        raise TypeError(
            f"{kind}: shape must be the weight's sizes, (N, K) or (E, N, K), got {str(shape)[:80]!r}."
        ) from None
    if len(sizes) not in (2, 3) or min(sizes) < 0 or sizes[-1] < 1:
        raise ValueError(f"{kind}: shape must be (N, K) or (E, N, K) with K >= 1, got {sizes}.")
    return sizes


def check_all(op: str, matrices: Sequence[Any], kind: type) -> None:
    """Check that everything in a sequence is of one class.

    Raises:
        TypeError: something else is in it, or it is no sequence.
    """
    if isinstance(matrices, Sequence):
        others = [type(one).__name__ for one in matrices if not isinstance(one, kind)]
        got = f"one with {others[0]}" if others else ""
    else:
        got = type(matrices).__name__
    if got:
        raise TypeError(f"{op}: takes a list of {kind.__name__}, got {got}. Quantize its matrices first.")


def check_parts(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    bits: int | None = None,
) -> None:
    """Check dtypes, shapes and devices of a quantized weight's parts.

    Args:
        packed, absmax, codebook, scale: see `QuantizedTensor`.
        in_features: K.
        bits: expected width; taken from the codebook's length when None.

    Raises:
        TypeError: a part has the wrong dtype.
        ValueError: a part has the wrong shape or device.
    """
    scale_dtypes = tuple(fmt.dtype for fmt in ABSMAX_FORMATS.values())  # now: formats can be added
    _check_dtypes_and_device(
        packed=(packed, (torch.int32,)),
        absmax=(absmax, scale_dtypes),
        codebook=(codebook, (torch.float32,)),
        scale=(scale, (torch.float32,)),
    )
    width = _code_width(codebook, bits)
    if packed.dim() not in (2, 3) or absmax.dim() != packed.dim():
        raise ValueError(
            f"quantized weight: packed must be [N, blocks * bits] or [E, N, blocks * bits] and absmax alike, "
            f"got {tuple(packed.shape)} and {tuple(absmax.shape)}."
        )
    blocks = reference.blocks_of(in_features)
    rows = packed.shape[:-1]
    if in_features < 1 or packed.shape[-1] != blocks * width or absmax.shape[-1] != blocks:
        raise ValueError(
            f"quantized weight: {in_features} in-features at {width} bits need {blocks * width} words and "
            f"{blocks} scales a row, got {packed.shape[-1]} and {absmax.shape[-1]}. "
            f"Is in_features or the codebook that of another layer?"
        )
    if rows != absmax.shape[:-1] or scale.shape != rows[:-1]:
        raise ValueError(
            f"quantized weight: packed {tuple(packed.shape)}, absmax {tuple(absmax.shape)} and scale "
            f"{tuple(scale.shape)} do not belong to one weight."
        )


def check_tiles(
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    out_features: int,
    in_features: int,
    bits: int | None = None,
) -> None:
    """Check dtypes, shapes and devices of a weight in tiled form.

    Args:
        tiled, codebook, scale: see `QuantizedTensor`.
        out_features: N.
        in_features: K.
        bits: expected width; taken from the codebook's length when None.

    Raises:
        TypeError: a part has the wrong dtype.
        ValueError: a part has the wrong shape or device.
    """
    _check_dtypes_and_device(
        tiles=(tiled, (torch.int32,)),
        codebook=(codebook, (torch.float32,)),
        scale=(scale, (torch.float32,)),
    )
    width = _code_width(codebook, bits)
    check_tile_shape("tiled weight", tiled, width, out_features, in_features, "sizes or the codebook")
    if scale.shape != tiled.shape[:-3]:
        raise ValueError(
            f"tiled weight: tiles {tuple(tiled.shape)} and scale {tuple(scale.shape)} do not belong to one "
            f"weight."
        )


def _check_dtypes_and_device(**parts: tuple[torch.Tensor, tuple[torch.dtype, ...]]) -> None:
    """Check that each part is dense and of its dtype, and that all are where the first is."""
    first = next(iter(parts))
    for name, (part, dtypes) in parts.items():
        got = part.dtype if isinstance(part, torch.Tensor) else type(part).__name__
        if got not in dtypes:
            known = " or ".join(map(dtype_name, dtypes))
            raise TypeError(f"quantized weight: {name} must be {known}, got {got}.")
        if part.layout is not torch.strided or part.is_nested:
            raise TypeError(
                f"quantized weight: {name} must be dense, got "
                f"{'a nested tensor' if part.is_nested else part.layout}. Use .to_dense()."
            )
        if part.device != (device := parts[first][0].device):
            raise ValueError(
                f"quantized weight: {name} is on {part.device}, {first} on {device}. Move them together."
            )


def _code_width(codebook: torch.Tensor, bits: int | None) -> int:
    """Bits of a code, from the codebook's length; `bits` is what is expected."""
    # A size that is traced is a symbol, which has no hash.
    width = _WIDTHS.get(int(codebook.shape[0])) if codebook.dim() == 1 else None
    if width is None or bits not in (None, width):
        *fewer, most = _WIDTHS
        any_width = f"{', '.join(map(str, fewer))} or {most} levels"
        expected = any_width if bits is None else f"{2 ** check_bits(bits)} levels for {bits} bits"
        raise ValueError(f"codebook: expected {expected}, got shape {tuple(codebook.shape)}. Is bits right?")
    return width
