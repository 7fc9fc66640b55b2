"""Decode + cuBLAS: what takes any problem. Weights are decoded to x's dtype in bounded chunks of N."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kbit.backends.cuda import operands, rows
from kbit.format.codebook import bits_of

# Weights decoded at a time: 256 MB of 16-bit weights, more than a layer of most models.
_CHUNK_WEIGHTS = 128 * 2**20


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
    """out = x @ W^T + bias, W decoded by `decode(first row, rows to write)`."""
    n, k = out.shape[-1], x.shape[-1]
    chunk = max(1, _CHUNK_WEIGHTS // k)
    w = x.new_empty((min(n, chunk), k))
    for first in range(0, n, chunk):
        rows_now = w[: min(chunk, n - first)]
        decode(first, rows_now)
        part = slice(first, first + rows_now.shape[0])
        if bias is None:
            torch.mm(x, rows_now.t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, rows_now.t(), out=out[:, part])
