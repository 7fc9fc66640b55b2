"""QuantizedTensor: the canonical form of a quantized weight, as one object."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kbit.format import reference
from kbit.format.codebook import check_bits
from kbit.format.scales import ABSMAX_FORMATS, absmax_format


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A weight matrix, or a stack of them, in the canonical bit-plane form.

    Attributes:
        packed: int32 [..., N, blocks * bits], bit-planes.
        absmax: [..., N, blocks], uint8 (E4M4), float16 or float32.
        codebook: float32 [2^bits].
        scale: float32 [...], a power of two per matrix, 1 unless the block scales need it.
        bits: code width, 2 to 5.
        shape: shape of the weight, (N, K) or (E, N, K).

    Raises:
        TypeError, ValueError: the parts do not belong together.
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    codebook: torch.Tensor
    scale: torch.Tensor
    bits: int
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_parts(self.packed, self.absmax, self.codebook, self.scale, self.shape[-1], bits=self.bits)
        if tuple(self.absmax.shape[:-1]) != tuple(self.shape[:-1]):
            raise ValueError(
                f"quantized tensor: shape {tuple(self.shape)} does not match absmax "
                f"{tuple(self.absmax.shape)}; every dimension but the last must be equal."
            )

    @property
    def device(self) -> torch.device:
        """Where the data is."""
        return self.packed.device

    @property
    def absmax_format(self) -> str:
        """Name of the block scale format."""
        return absmax_format(self.absmax.dtype).name

    @property
    def nbytes(self) -> int:
        """Bytes of packed codes and block scales."""
        return self.packed.nbytes + self.absmax.nbytes

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, padding included: bits + 8 / 32 with E4M4 scales and K a multiple of 32."""
        return 8.0 * self.nbytes / max(1, math.prod(self.shape))

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """A copy on `device`; itself if it is there already."""
        if torch.device(device) == self.device:
            return self
        parts = ("packed", "absmax", "codebook", "scale")
        return replace(self, **{name: getattr(self, name).to(device) for name in parts})

    @classmethod
    def stack(cls, matrices: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """One [E, N, K] weight from E quantized matrices of one shape, width and codebook."""
        first = matrices[0]
        packed, absmax, scale = (
            torch.stack([getattr(q, part) for q in matrices]) for part in ("packed", "absmax", "scale")
        )
        return cls(packed, absmax, first.codebook, scale, first.bits, (len(matrices), *first.shape))

    def __repr__(self) -> str:
        return (
            f"QuantizedTensor(shape={tuple(self.shape)}, bits={self.bits}, absmax={self.absmax_format}, "
            f"bits_per_weight={self.bits_per_weight:.2f}, device={self.device})"
        )


def check_parts(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    bits: int | None = None,
    where: str = "",
) -> None:
    """Check dtypes, shapes and devices of a quantized weight's parts; reads no data, so it can be traced.

    Args:
        packed, absmax, codebook, scale: see `QuantizedTensor`.
        in_features: K.
        bits: expected width; taken from the codebook's length when None.
        where: name of the layer, for the message.

    Raises:
        TypeError: a part has the wrong dtype.
        ValueError: a part has the wrong shape or device.
    """
    tail = f" ({where})" if where else ""
    scale_dtypes = tuple(fmt.dtype for fmt in ABSMAX_FORMATS.values())
    for name, part, dtypes in (
        ("packed", packed, (torch.int32,)),
        ("absmax", absmax, scale_dtypes),
        ("codebook", codebook, (torch.float32,)),
        ("scale", scale, (torch.float32,)),
    ):
        if part.dtype not in dtypes:
            raise TypeError(f"quantized weight: {name} must be {_names(dtypes)}, got {part.dtype}{tail}.")
        if part.device != packed.device:
            raise ValueError(
                f"quantized weight: {name} is on {part.device}, packed on {packed.device}{tail}. "
                f"Move them together."
            )
    levels = codebook.shape[0] if codebook.dim() == 1 else 0
    width = levels.bit_length() - 1
    if levels not in (4, 8, 16, 32) or (bits is not None and check_bits(bits) != width):
        expected = f"{2**bits} levels for {bits} bits" if bits else "4, 8, 16 or 32 levels"
        raise ValueError(f"codebook: expected {expected}, got shape {tuple(codebook.shape)}{tail}.")
    if packed.dim() not in (2, 3) or absmax.dim() != packed.dim():
        raise ValueError(
            f"quantized weight: packed must be [N, blocks * bits] or [E, N, blocks * bits] and absmax alike, "
            f"got {tuple(packed.shape)} and {tuple(absmax.shape)}{tail}."
        )
    blocks = reference.blocks_of(in_features)
    rows = packed.shape[:-1]
    if in_features < 1 or packed.shape[-1] != blocks * width or absmax.shape[-1] != blocks:
        raise ValueError(
            f"quantized weight: {in_features} in-features at {width} bits need {blocks * width} words and "
            f"{blocks} scales a row, got {packed.shape[-1]} and {absmax.shape[-1]}{tail}. "
            f"Is in_features or the codebook that of another layer?"
        )
    if rows != absmax.shape[:-1] or scale.shape != rows[:-1]:
        raise ValueError(
            f"quantized weight: packed {tuple(packed.shape)}, absmax {tuple(absmax.shape)} and scale "
            f"{tuple(scale.shape)} do not belong to one weight{tail}."
        )


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
