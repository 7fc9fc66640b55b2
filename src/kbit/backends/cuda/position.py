"""Rotary position embedding, csrc/rotary.cu and csrc/rotary_angles.cu: what they take, and their launches."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import position as reference

_FORMAT = "QQQQQQ" + "Q" * 8 + "i" * 7
_ANGLES_FORMAT = "QQQQiif"


@functools.cache
def _spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec.make("rotary.cu", bf16=dtype == torch.bfloat16)


@functools.cache
def _angles_spec(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec.make("rotary_angles.cu", bf16=dtype == torch.bfloat16)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [of(dtype) for of in (_spec, _angles_spec) for dtype in operands.DTYPES]


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out_query: torch.Tensor,
    out_key: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """`kbit::rotary` into contiguous outputs; the reference where the kernel may not.

    Args:
        query: [B, H, T, D], float16, bfloat16 or float32, one element or more.
        key: [B, H', T, D].
        cos, sin: [B or 1, T, R], R even and at most D.
        out_query, out_key: [B, T, H, D] and [B, T, H', D].
        interleaved: as in `kbit.ops.rotary_schemas`.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    strides = operands.all_pieces(query, key, cos, sin)
    batch, heads, tokens, columns = query.shape
    pieces, half = columns // operands.PIECE, cos.shape[-1] // (2 * operands.PIECE)
    count = batch * tokens * (heads + key.shape[1]) * (pieces - half)
    whole = not columns % operands.PIECE and not cos.shape[-1] % (2 * operands.PIECE)
    takes = query.dtype in operands.DTYPES and whole and count <= elementwise.MOST_THREADS
    if not takes or strides is None or strides[2] != strides[3]:
        reference.rotary(query, key, cos, sin, out_query, out_key, interleaved)
        return
    by_query, by_key, by_angle, _ = strides
    along = operands.by_sequence(cos, by_angle)
    index = query.device.index
    kernel = launcher.load(_spec(query.dtype), index, _FORMAT)
    sizes = (count, tokens, heads, key.shape[1], pieces, half, int(interleaved))
    places = operands.addresses(query, key, cos, sin, out_query, out_key)
    elementwise.launch(index, kernel, count, (*places, *by_query, *by_key, *along, *sizes))


def rotary_angles(
    frequencies: torch.Tensor,
    positions: torch.Tensor,
    factor: float,
    out_cos: torch.Tensor,
    out_sin: torch.Tensor,
) -> None:
    """`kbit::rotary_angles`; the reference where the kernel may not.

    Args:
        frequencies: float32 [R / 2], contiguous.
        positions: int64 [B, T], contiguous.
        factor: of cosines and sines.
        out_cos, out_sin: [B, T, R], float16, bfloat16 or float32, contiguous, one element or more.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    count = positions.numel() * len(frequencies)
    if out_cos.dtype not in operands.DTYPES or count > elementwise.MOST_THREADS:
        reference.rotary_angles(frequencies, positions, factor, out_cos, out_sin)
        return
    index = out_cos.device.index
    kernel = launcher.load(_angles_spec(out_cos.dtype), index, _ANGLES_FORMAT)
    places = operands.addresses(frequencies, positions, out_cos, out_sin)
    elementwise.launch(index, kernel, count, (*places, count, len(frequencies), factor))
