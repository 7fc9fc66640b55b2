"""NVFP4Tensor: a matrix, or a stack of expert matrices, in NVFP4."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from kbit.format import type_checks
from kbit.format.errors import KbitError
from kbit.format.part_checks import check_all, sizes_of
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import at, counted, dtype_name
from kbit.nvfp4.formats import layouts


class NonFiniteError(KbitError):
    """A tensor to be quantized holds NaN or Inf after its scaling; their blocks would become 0.

    Attributes:
        count: values that are NaN or infinite.
        blocks: blocks of 16 that hold them.
        where: name of the tensor or layer; may be empty.
    """

    def __init__(self, count: int, blocks: int, where: str = "") -> None:
        self.count, self.blocks, self.where = count, blocks, where
        super().__init__(
            f"quantize_nvfp4: {counted(count, 'NaN or Inf value')} after scaling would zero "
            f"{counted(blocks, 'block')} of 16{at(where)}. Repair the input or its scales, or "
            f"pass check=False to accept zeros."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, where an exception pickles its message: worker processes send it back."""
        return type(self), (self.count, self.blocks, self.where), self.__dict__


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """value[..., n, k] = (magnitude * scale * global_scale) * row_scale[n], rounded after each global factor.

    Attributes:
        codes: uint8, e2m1 codes in layout nv; scales and codes together in the interleaved layouts. Shape:
            see `layouts.codes_shape`.
        scales: uint8 [..., N, K16 / 16], ue4m3; None in the interleaved layouts, which hold their own.
        global_scale: float32 [...] of the leading dimensions, multiplied: one for a matrix, one per expert
            for a stack. That of a matrix stays on the CPU: launches need its value and must not wait.
        shape: (N, K) or (E, N, K).
        layout: "nv", "ggml", "mmq" or "tiled".
        row_scale: float32 [N], multiplied; None for 1. Only for a matrix.

    Parts that are not contiguous, such as slices of columns, are copied: kernels get addresses alone.

    Raises:
        TypeError, ValueError: the parts do not belong together.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None
    global_scale: torch.Tensor
    shape: tuple[int, ...]
    layout: str = "nv"
    row_scale: torch.Tensor | None = None

    # What does with one of these what the key does with a k-bit weight; `kbit.format.type_checks` names it.
    functions: ClassVar[dict[str, str]] = {
        "dequantize": "kbit.nvfp4.dequantize_nvfp4",
        "linear": "kbit.nvfp4.linear_nvfp4",
        "grouped_linear": "kbit.nvfp4.moe_gemm_nvfp4",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", sizes_of(self.shape, "NVFP4 tensor"))
        layouts.check_layout(self.layout, "NVFP4 tensor")
        expected = layouts.codes_shape(self.shape, self.layout)
        _check_part("codes", self.codes, torch.uint8, expected, None)
        if (self.scales is None) != (self.layout != "nv"):
            raise ValueError(
                f"NVFP4 tensor: layout nv has scales, the others hold theirs in codes; got layout "
                f"{self.layout!r} {'without' if self.scales is None else 'with'} scales."
            )
        if self.scales is not None:
            shape = (*self.shape[:-1], layouts.round_up(self.shape[-1]) // layouts.SUB_BLOCK)
            _check_part("scales", self.scales, torch.uint8, shape, self.codes.device)
        stacked = len(self.shape) == 3
        device = self.codes.device if stacked else torch.device("cpu")
        _check_part("global_scale", self.global_scale, torch.float32, self.shape[:-2], device)
        if self.row_scale is not None:
            if stacked:
                raise ValueError("NVFP4 tensor: row_scale is for a matrix [N, K], got a stack of experts.")
            _check_part("row_scale", self.row_scale, torch.float32, self.shape[:1], self.codes.device)
        for name in ("codes", "scales", "global_scale", "row_scale"):
            part = getattr(self, name)
            if part is not None and not part.is_contiguous():
                object.__setattr__(self, name, part.contiguous())

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element: 4.5 where nothing is padded."""
        return 8.0 * self.nbytes / max(1, math.prod(self.shape))

    def nv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, scales) in layout nv; a conversion in the other layouts."""
        if self.scales is not None:
            return self.codes, self.scales
        return layouts.to_nv(self.codes, self.layout, self.shape[-1], self.shape[-2])

    def to(self, device: torch.device | str) -> NVFP4Tensor:
        """A copy on `device`; a matrix's global_scale stays on the CPU."""
        scales = None if self.scales is None else self.scales.to(device)
        row_scale = None if self.row_scale is None else self.row_scale.to(device)
        global_scale = self.global_scale.to(device) if len(self.shape) == 3 else self.global_scale
        return replace(
            self, codes=self.codes.to(device), scales=scales, global_scale=global_scale, row_scale=row_scale
        )

    def expert(self, index: int) -> NVFP4Tensor:
        """One matrix of a stack, sharing its memory.

        Raises:
            ValueError: this is a single matrix.
        """
        if len(self.shape) != 3:
            raise ValueError(f"NVFP4 tensor: only a stack [E, N, K] has experts, got shape {self.shape}.")
        scales = None if self.scales is None else self.scales[index]
        return NVFP4Tensor(
            self.codes[index], scales, self.global_scale[index].cpu(), self.shape[1:], self.layout
        )

    @classmethod
    def stack(cls, matrices: list[NVFP4Tensor]) -> NVFP4Tensor:
        """One stack [E, N, K] of matrices of one shape and layout, without row scales.

        Raises:
            TypeError: one of them is no `NVFP4Tensor`.
            ValueError: there is none, or they differ.
        """
        check_all("NVFP4 tensor: stack", matrices, cls)
        found = {(t.shape, t.layout, t.device, t.row_scale is None) for t in matrices}
        if len(found) != 1 or matrices[0].row_scale is not None or len(matrices[0].shape) != 2:
            raise ValueError(
                f"NVFP4 tensor: a stack needs matrices of one shape, layout and device without row scales, "
                f"got {len(matrices)} of {len(found)} kinds."
            )
        first = matrices[0]
        scales = (
            torch.stack([t.scales for t in matrices if t.scales is not None])
            if first.scales is not None
            else None
        )
        factors = torch.stack([t.global_scale for t in matrices]).to(first.device)
        codes = torch.stack([t.codes for t in matrices])
        return cls(codes, scales, factors, (len(matrices), *first.shape), first.layout)

    def __repr__(self) -> str:
        return (
            f"NVFP4Tensor(shape={self.shape}, layout={self.layout}, "
            f"bits_per_weight={self.bits_per_weight:.2f}, device={self.device})"
        )


def _check_part(
    name: str, part: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device | None
) -> None:
    """Check a part; `device` is where the others are, None for the first of them."""
    type_checks.tensor("NVFP4 tensor", name, part)
    if part.dtype != dtype:
        raise TypeError(f"NVFP4 tensor: {name} must be {dtype_name(dtype)}, got {dtype_name(part.dtype)}.")
    if tuple(part.shape) != tuple(shape):
        raise ValueError(
            f"NVFP4 tensor: {name} must have shape {tuple(shape)}, got {tuple(part.shape)}. Is it that of "
            f"another tensor or layout?"
        )
    if device is not None and part.device != device:
        raise ValueError(f"NVFP4 tensor: {name} must be on {device}, got {part.device}. Move it there.")


def check_nvfp4(op: str, name: str, value: object, where: str = "") -> None:
    """Check that the argument `name` of an op is in NVFP4.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(value, NVFP4Tensor):
        return
    remedy = f"Make one: kbit.nvfp4.quantize_nvfp4({name})"
    if isinstance(value, QuantizedTensor):
        for_codes = {other: f"kbit.{mine}" for mine, other in NVFP4Tensor.functions.items()}
        remedy = f"Use {for_codes.get(f'kbit.nvfp4.{op}', 'kbit.linear')} for k-bit weights"
    raise TypeError(f"{op}: {name} must be an NVFP4Tensor, got {type(value).__name__}{at(where)}. {remedy}.")
