"""Decode + cuBLAS: what takes any problem. Weights are decoded to x's dtype in bounded chunks of N."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kbit.backends.cuda import operands, rows
from kbit.backends.reference.products import GPU_CHUNK_WEIGHTS, whole_steps
from kbit.format.codebook import bits_of


def linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """Multiply by a weight in the tiled layout; see `kbit.backends.cuda.products.linear_tiled`."""
    target = x.new_empty((x.shape[0], out_features)) if silu_and_mul else out
    bits = bits_of(codebook)

    def decode(first: int, w: torch.Tensor) -> None:
        rows.dequantize_tiled(tiled, codebook, scale, bits, first, w)

    _multiply(x, decode, bias, target)
    if silu_and_mul:
        operands.activate(target, out)


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out: torch.Tensor,
) -> None:
    """Multiply by a weight in the canonical form [N, K], any block scale format."""

    def decode(first: int, w: torch.Tensor) -> None:
        part = slice(first, first + w.shape[0])
        rows.dequantize(packed[part], absmax[part], codebook, scale, in_features, w)

    _multiply(x, decode, bias, out)


def _multiply(
    x: torch.Tensor,
    decode: Callable[[int, torch.Tensor], None],
    bias: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out = x @ W^T + bias, W decoded by `decode(first row, rows to write)`.

    Where 16-bit rows, of operands or the result, are not aligned to 16 bytes, cuBLAS may add up parts of K in
    16 bits, and takes longer. So columns of zeros and rows of nothing in particular make them so. Zeros also
    make K whole steps, of which it leaves out none.
    """
    n, k = out.shape[-1], x.shape[-1]
    short = x.dtype != torch.float32
    wide = operands.padded(n) if short else n
    y = out if wide == n else x.new_empty((x.shape[0], wide))
    if bias is not None:
        bias = F.pad(bias, (0, wide - n))
    if short:
        missing = whole_steps(k) - k
        x = operands.aligned_rows(F.pad(x, (0, missing)) if missing else x)
    long = x.shape[-1]
    chunk = operands.padded(max(1, GPU_CHUNK_WEIGHTS // long - operands.PIECE + 1))
    w = x.new_zeros((min(wide, chunk), long)) if long > k else x.new_empty((min(wide, chunk), k))
    decoded = w.new_empty((len(w), k)) if long > k else w
    for first in range(0, n, chunk):
        part, count = slice(first, min(first + chunk, wide)), min(chunk, n - first)
        decode(first, decoded[:count])
        if decoded is not w:
            w[:count, :k] = decoded[:count]
        rows_now = w[: part.stop - first].t()
        if bias is None:
            torch.mm(x, rows_now, out=y[:, part])
        else:
            torch.addmm(bias[part], x, rows_now, out=y[:, part])
    if y is not out:
        out.copy_(y[:, :n])
