"""The functional API on `QuantizedTensor`s: `kbit.quantize`, `dequantize`, `linear`, `grouped_linear`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kbit.format.codebook import check_bits, get_codebook
from kbit.format.errors import NonFiniteWeightError
from kbit.format.tensor import QuantizedTensor
from kbit.ops import checks


def quantize(
    w: torch.Tensor,
    bits: int = 4,
    codebook: str | Sequence[float] | torch.Tensor = "nf",
    scale: str = "e4m4",
    search: bool = True,
    *,
    where: str = "",
) -> QuantizedTensor:
    """Quantize a weight, or a stack of them, in blocks of 32 along its last dimension.

    Args:
        w: [N, K] or [E, N, K], float32, float16 or bfloat16, finite; any N and K.
        bits: code width, 2 to 5.
        codebook: "nf", or 2^bits ascending levels with largest magnitude 1.
        scale: block scale format: "e4m4" (one byte), "float16" or "float32".
        search: pick each block's scale for the least squared error among its neighbours (default), or
            take the rounded absmax.
        where: name of the layer, for error messages.

    Returns:
        A `QuantizedTensor` on w's device.

    Raises:
        NonFiniteWeightError: w holds NaN or Inf.
        TypeError, ValueError: w, bits, codebook or scale format are not legal.

    >>> q = kbit.quantize(torch.randn(64, 256), bits=4)
    >>> q.bits_per_weight
    4.25
    """
    levels = get_codebook(codebook, check_bits(bits)).to(w.device)
    try:
        packed, absmax, factor = torch.ops.kbit.quantize(w, levels, bits, scale, search)
    except NonFiniteWeightError as error:
        raise NonFiniteWeightError(error.count, where) from None
    return QuantizedTensor(packed, absmax, levels, factor, bits, tuple(w.shape))


def dequantize(
    q: QuantizedTensor, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode a quantized weight.

    Args:
        q: the weight.
        dtype: float32, float16 or bfloat16; the codebook is rounded to it once, each product once more.
        out: where to write, of q's shape and `dtype`.

    Returns:
        A tensor of q's shape.

    Raises:
        TypeError, ValueError: dtype or out are not legal.

    >>> kbit.dequantize(q, torch.bfloat16).shape
    torch.Size([64, 256])
    """
    parts = (*_parts(q), q.shape[-1], dtype)
    if out is not None:
        torch.ops.kbit.dequantize.out(*parts, out=out)
        return out
    return torch.ops.kbit.dequantize(*parts)


def linear(
    x: torch.Tensor,
    q: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    where: str = "",
) -> torch.Tensor:
    """y = x @ W^T + bias on packed weights; differentiable in x and bias.

    Args:
        x: [..., K], float32, float16 or bfloat16; any number of rows, 0 included.
        q: weight [N, K].
        bias: [N] of x's dtype.
        out: where to write [..., N]; not with gradients.
        where: name of the layer, for error messages.

    Returns:
        [..., N] of x's dtype, accumulated in float32 and rounded once.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not fit; the message says which.

    >>> kbit.linear(torch.randn(3, 256), q).shape
    torch.Size([3, 64])
    """
    arguments = (x, *_parts(q), bias, q.shape[-1])
    checks.linear(*arguments, where=where)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    if out is not None:
        _refuse_grad("linear", needs_grad)
        torch.ops.kbit.linear.out(*arguments, out=out)
        return out
    if needs_grad:
        return torch.ops.kbit.linear_train(*arguments)
    return torch.ops.kbit.linear(*arguments)


def grouped_linear(
    x: torch.Tensor,
    q: QuantizedTensor,
    expert_offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    where: str = "",
) -> torch.Tensor:
    """One linear per expert on rows sorted by expert; differentiable in x.

    Args:
        x: [T, K], float32, float16 or bfloat16, rows sorted by expert.
        q: weights [E, N, K].
        expert_offsets: int32 [E + 1] on x's device, ascending: rows offsets[e] to offsets[e + 1] belong to
            expert e. Rows outside every expert give 0.
        out: where to write [T, N]; not with gradients.
        where: name of the layer, for error messages.

    Returns:
        [T, N] of x's dtype.

    Raises:
        TypeError, ValueError: dtypes, shapes or devices do not fit; on the CPU also offsets that are not
            ascending or leave 0..T.
    """
    arguments = (x, *_parts(q), expert_offsets, q.shape[-1])
    checks.grouped_linear(*arguments, where=where)
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    if out is not None:
        _refuse_grad("grouped_linear", needs_grad)
        torch.ops.kbit.grouped_linear.out(*arguments, out=out)
        return out
    if needs_grad:
        return torch.ops.kbit.grouped_linear_train(*arguments)
    return torch.ops.kbit.grouped_linear(*arguments)


def embedding(ids: torch.Tensor, q: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Decode the rows of a quantized table that `ids` name.

    Args:
        ids: int32 or int64, any shape, each in 0..N-1.
        q: table [N, K].
        dtype: float32, float16 or bfloat16.

    Returns:
        [*ids.shape, K].

    Raises:
        IndexError: an id is out of range (on the CPU).
        TypeError, ValueError: dtypes, shapes or devices do not fit.
    """
    return torch.ops.kbit.embedding(ids, *_parts(q), q.shape[-1], dtype)


def _parts(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.packed, q.absmax, q.codebook, q.scale


def _refuse_grad(op: str, needs_grad: bool) -> None:
    if needs_grad:
        raise ValueError(f"{op}: out= cannot be combined with gradients. Drop out=, or use torch.no_grad().")
