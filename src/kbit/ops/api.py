"""Functions of `QuantizedTensor`s: `kbit.quantize`, `dequantize`, `linear`, `grouped_linear`, `embedding`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kbit.format import type_checks
from kbit.format.codebook import get_codebook
from kbit.format.errors import NonFiniteWeightError
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import at
from kbit.ops import checks, forms, grad_checks, operand_checks, places


@torch.inference_mode(False)  # gradients may be asked for later
def quantize(
    w: torch.Tensor,
    bits: int = 4,
    codebook: str | Sequence[float] | torch.Tensor = "nf",
    scale: str = "e4m4",
    search: bool = True,
    *,
    where: str = "",
    absmax_format: str | None = None,
) -> QuantizedTensor:
    """Quantize a weight, or a stack of them, in blocks of 32 along its last dimension.

    Args:
        w: [N, K] or [E, N, K], float32, float16 or bfloat16, finite; any N and K >= 1. Gradients end here.
        bits: code width, 2 to 5.
        codebook: "nf", "bof", or 2^bits ascending levels with largest magnitude 1.
        scale: block scale format: "e4m4" (one byte), "float16" or "float32".
        search: pick each block's scale for the least squared error among its neighbours (default), or
            take the rounded absmax.
        where: name of the layer, for error messages.
        absmax_format: another name for `scale`, the one that layers and policies have.

    Returns:
        A `QuantizedTensor` on w's device.

    Raises:
        NonFiniteWeightError: w holds NaN or Inf.
        TypeError, ValueError: w, bits, codebook or scale format are not legal, or two formats are given.

    >>> q = kbit.quantize(torch.randn(64, 256), bits=4)
    >>> q.bits_per_weight
    4.25
    """
    type_checks.tensor("quantize", "w", w, where)
    type_checks.flag("quantize", "search", search, where)
    form = _scale_format(scale, absmax_format, where)
    levels = get_codebook(codebook, bits, where).to(w.device)
    w = w.detach()  # else torch takes float results for differentiable ones
    checks.quantize(w, levels, bits, form, where)
    try:
        packed, absmax, factor = torch.ops.kbit.quantize(w, levels, bits, form, search)
    except NonFiniteWeightError as error:
        raise NonFiniteWeightError(error.count, where) from None
    return QuantizedTensor(packed, absmax, levels, factor, bits, tuple(w.shape))


def _scale_format(scale: str, absmax_format: str | None, where: str) -> str:
    if absmax_format is not None and scale not in ("e4m4", absmax_format):
        raise TypeError(
            f"quantize: scale and absmax_format are one setting, got {scale!r} and {absmax_format!r}"
            f"{at(where)}. Give one of them."
        )
    return scale if absmax_format is None else absmax_format


def dequantize(
    q: QuantizedTensor, dtype: torch.dtype = torch.float32, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Decode a quantized weight.

    Args:
        q: the weight.
        dtype: float32, float16 or bfloat16; the codebook is rounded to it once, each product once more.
        out: where to write, contiguous, of q's shape and `dtype`.

    Returns:
        A tensor of q's shape.

    Raises:
        TypeError, ValueError: q is not quantized; dtype or out are not legal.

    >>> kbit.dequantize(q, torch.bfloat16).shape
    torch.Size([64, 256])
    """
    type_checks.quantized("dequantize", q)
    checks.float_dtype("dequantize", "dtype", dtype)
    if q.tiled is None:
        op: Any = torch.ops.kbit.dequantize
        arguments: tuple[Any, ...] = (*_parts(q), q.shape[-1], dtype)
    else:
        op = torch.ops.kbit.dequantize_tiled
        arguments = (q.tiled, q.codebook, q.scale, *q.shape[-2:], dtype)
    operand_checks.given_out("dequantize", out, False)
    return _run(op, arguments, out)


def linear(
    x: torch.Tensor,
    q: QuantizedTensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    where: str = "",
) -> torch.Tensor:
    """y = x @ W^T + bias on packed weights; differentiable in x and bias.

    On a GPU the first call changes a weight with E4M4 scales to its tiled form, see `QuantizedTensor.tile`;
    later ones wait for nothing. torch.compile and CUDA graphs record the form that they find, so call once,
    or `q.tile()`, ahead of them: the canonical form works too, but is decoded at every call.

    Args:
        x: [..., K], float32, float16 or bfloat16; any number of rows, 0 included.
        q: weight [N, K].
        bias: [N] of x's dtype.
        out: where to write the result, contiguous and apart from x; not with gradients.
        activation: None, or "silu_and_mul": W holds I rows of gate above I rows of up, N = 2I, and the result
            is silu(gate) * up. Each step is rounded to x's dtype, as in layers that are not merged.
        where: name of the layer, for error messages.

    Returns:
        [..., N], or [..., I] with an activation, of x's dtype; products are accumulated in float32 and
        rounded once.

    Raises:
        NotImplementedError: x or the bias has a forward-mode tangent, or torch.func differentiates.
        TypeError, ValueError: dtypes, shapes or devices do not fit; the message says which.

    >>> kbit.linear(torch.randn(3, 256), q).shape
    torch.Size([3, 64])
    """
    type_checks.quantized("linear", q, where)
    fused = checks.is_silu_and_mul("linear", activation, where)
    checks.linear_inputs(x, q.shape, q.device, bias, fused, where)
    grad_checks.no_tangent("linear", where, x, bias)
    needs_grad = grad_checks.wants_grad(x, bias)
    if needs_grad:
        grad_checks.no_transform("linear", where)
    return _multiply("linear", x, q, bias, out, fused, needs_grad, where)


def grouped_linear(
    x: torch.Tensor,
    q: QuantizedTensor,
    expert_offsets: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    where: str = "",
) -> torch.Tensor:
    """One linear per expert on rows sorted by expert; differentiable in x.

    Args:
        x: [T, K], float32, float16 or bfloat16, rows sorted by expert.
        q: weights [E, N, K]; see `linear` for their form.
        expert_offsets: int32 [E + 1] on x's device, ascending: rows offsets[e] to offsets[e + 1] belong to
            expert e. Rows outside every expert give 0.
        out: where to write the result, contiguous and apart from x; not with gradients.
        activation: None or "silu_and_mul", as in `linear`.
        where: name of the layer, for error messages.

    Returns:
        [T, N], or [T, N / 2] with an activation, of x's dtype.

    Raises:
        NotImplementedError: x has a forward-mode tangent, or torch.func differentiates.
        TypeError, ValueError: dtypes, shapes or devices do not fit; on the CPU also offsets that are not
            ascending or leave 0..T.
    """
    type_checks.quantized("grouped_linear", q, where)
    fused = checks.is_silu_and_mul("grouped_linear", activation, where)
    checks.grouped_inputs(x, q.shape, q.device, expert_offsets, fused, where)
    grad_checks.no_tangent("grouped_linear", where, x)
    needs_grad = grad_checks.wants_grad(x)
    if needs_grad:
        grad_checks.no_transform("grouped_linear", where)
    return _multiply("grouped_linear", x, q, expert_offsets, out, fused, needs_grad, where)


def _multiply(
    name: str,
    x: torch.Tensor,
    q: QuantizedTensor,
    extra: torch.Tensor | None,
    out: torch.Tensor | None,
    fused: bool,
    needs_grad: bool,
    where: str,
) -> torch.Tensor:
    """Call the op that multiplies q's form; `extra` is the bias or the offsets."""
    operand_checks.given_out(name, out, needs_grad, where)
    if q.tiled is None and forms.should_tile(q, name, q.device, q.absmax.dtype):
        q.tile()
    if q.tiled is None:
        arguments: tuple[Any, ...] = (x, *_parts(q), extra, q.shape[-1])
    else:
        name += "_tiled"
        arguments = (x, q.tiled, q.codebook, q.scale, extra, *q.shape[-2:])
    op: Any = getattr(torch.ops.kbit, f"{name}_train" if needs_grad else name)
    try:  # costs nothing where nothing is raised
        if fused and (needs_grad or q.tiled is None):
            y = silu_and_mul(op(*arguments))
            return y if out is None else _copy(name, y, out)
        if fused:
            arguments += (True,)
        return _run(op, arguments, out)
    except (TypeError, ValueError) as error:
        told = places.placed(error, where)
        if told is error:  # with its cause
            raise
        raise told from None


def _run(op: Any, arguments: tuple[Any, ...], out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return op(*arguments)
    op.out(*arguments, out=out)
    return out


def silu_and_mul(merged: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [..., 2I], gate first; what the ops with silu_and_mul fuse."""
    gate, up = merged.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def moe_combine(
    y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """`kbit::moe_combine` with gradients: a gather and a sum, because atomic adds have no fixed order.

    Args:
        y: [R, H], rows sorted by expert.
        inverse, bounds: int32 [T, U] and [E + 1], see `kbit::moe_align`.
        weights: [T, U].

    Returns:
        [T, H] of y's dtype.
    """
    chosen = y.index_select(0, inverse.flatten()).view(*inverse.shape, y.shape[-1])
    mine = (inverse < bounds[-1]).unsqueeze(-1)
    return torch.where(mine, chosen.float() * weights.float().unsqueeze(-1), 0.0).sum(dim=1).to(y.dtype)


def _copy(name: str, result: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    checks.output(name, out, tuple(result.shape), result.dtype, result.device)
    return out.copy_(result)


def embedding(
    ids: torch.Tensor,
    q: QuantizedTensor,
    dtype: torch.dtype = torch.float32,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode the rows of a quantized table that `ids` name.

    Args:
        ids: int32 or int64, any shape, each in 0..N-1.
        q: table [N, K]; best in canonical form: tiles are converted back at every call.
        dtype: float32, float16 or bfloat16.
        out: where to write, contiguous, [*ids.shape, K] of `dtype`.

    Returns:
        [*ids.shape, K].

    Raises:
        IndexError: an id is out of range (on the CPU).
        TypeError, ValueError: q is not quantized; dtypes, shapes or devices do not fit.
    """
    type_checks.quantized("embedding", q)
    type_checks.tensor("embedding", "ids", ids)
    checks.float_dtype("embedding", "dtype", dtype)
    operand_checks.given_out("embedding", out, False)
    try:
        return _run(torch.ops.kbit.embedding, (ids, *_parts(q), q.shape[-1], dtype), out)
    except IndexError as error:
        raise places.looked_up(error) from None


def _parts(q: QuantizedTensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return *q.canonical(), q.codebook, q.scale
