"""y = x @ W^T on the GPU: the fused kernel where it is legal and faster, else dequantize + cuBLAS.

Operands are contiguous, on one CUDA device, and checked by the op layer. Nothing waits for the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.backends.cuda import rows, stream

# Weights decoded at a time for cuBLAS: 256 MB of 16-bit weights, more than a layer of most models.
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
    """Multiply by a weight in the tiled layout.

    Args:
        x: [M, K], float16, bfloat16 or float32 (decoded to float32 and multiplied by cuBLAS), M >= 1.
        tiled: int32 [row tiles, column tiles, words]; see `kbit.backends.cuda.layout`.
        codebook: float32 [2^bits].
        scale: float32, the matrix's factor.
        bias: [N] of x's dtype.
        out_features: N.
        in_features: K.
        silu_and_mul: the rows of W are gates and then as many ups; out is silu(gate) * up.
        out: [M, N], or [M, N / 2] with silu_and_mul.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    if stream.refusal(x.shape[0], x.dtype, out_features, silu_and_mul) is None:
        stream.linear(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul, out)
        return
    target = x.new_empty((x.shape[0], out_features)) if silu_and_mul else out
    bits = codebook.shape[0].bit_length() - 1

    def decode(first: int, w: torch.Tensor) -> None:
        rows.dequantize_tiled(tiled, codebook, scale, bits, first, w)

    _multiply_decoded(x, decode, bias, target)
    if silu_and_mul:
        gate, up = target.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)


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
    """Multiply by a weight in the canonical form [N, K], any block scale format: decode + cuBLAS."""

    def decode(first: int, w: torch.Tensor) -> None:
        part = slice(first, first + w.shape[0])
        rows.dequantize(packed[part], absmax[part], codebook, scale, in_features, w)

    _multiply_decoded(x, decode, bias, out)


def _multiply_decoded(x, decode, bias, out: torch.Tensor) -> None:
    """out = x @ W^T + bias, W decoded by `decode(first row, rows to write)` in bounded chunks of N."""
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
