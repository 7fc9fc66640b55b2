"""Gradients in x of products with many experts: decode their weights and multiply, with nothing kept.

Gradients of rows are [T, N], sorted by expert; weights are decoded to their dtype, at most 1 GB at a time,
and multiplied by torch's grouped product. One expert after the other would be 128 times as many
launches, and the host would have to know the routing first.
"""

from __future__ import annotations

import torch

from kbit.backends.cuda import operands, rows
from kbit.format.codebook import bits_of

# Weights decoded at a time: all experts of a layer of Qwen3-30B-A3B (gate and up: 403 million).
_CHUNK_WEIGHTS = 512 * 2**20


def refusal(grad: torch.Tensor, out_features: int, in_features: int) -> str | None:
    """Why `grouped_linear_tiled_grad_input` may not take a problem, or None."""
    if grad.dtype != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, got {grad.dtype}"
    if torch.cuda.get_device_capability(grad.device)[0] < 9:
        return "torch's grouped product takes GPUs from Hopper on"
    if out_features % operands.PIECE or in_features % operands.PIECE:
        return f"rows of {out_features} and {in_features} numbers are not multiples of 16 bytes"
    return None


def grouped_linear_tiled_grad_input(
    grad: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    """grad [T, N] of rows sorted by expert -> [T, K]. Waits only where a layer's experts exceed 1 GB.

    Args:
        grad: bfloat16, contiguous.
        tiled: int32 [E, row tiles, column tiles, words].
        codebook: float32 [2^bits].
        scale: float32 [E].
        offsets: int32 [E + 1], ascending; rows offsets[e] to offsets[e + 1] are e's, of those there are.
            Others become zero.
        out_features: N.
        in_features: K.
    """
    experts, bits = tiled.shape[0], bits_of(codebook)
    each = min(experts, max(1, _CHUNK_WEIGHTS // (out_features * in_features)))
    # As csrc/groups.cuh takes them; torch's product would go beyond the rows there are.
    offsets = offsets.clamp(0, len(grad))
    w = grad.new_empty(each, out_features, in_features)
    if each == experts:
        rows.dequantize_tiled(tiled, codebook, scale, bits, 0, w)
        result = torch._grouped_mm(grad, w, offs=offsets[1:])
        # Rows of no expert are not written, and those in front of the first expert's were taken for its own.
        position = torch.arange(len(grad), device=grad.device, dtype=offsets.dtype)
        unrouted = (position < offsets[0]) | (position >= offsets[-1])
        return result.masked_fill_(unrouted[:, None], 0)
    result, bounds = grad.new_zeros(len(grad), in_features), offsets.tolist()
    for first in range(0, experts, each):
        last = min(first + each, experts)
        mine = slice(bounds[first], bounds[last])
        if mine.start < mine.stop:
            part = w[: last - first]
            rows.dequantize_tiled(tiled[first:last], codebook, scale[first:last], bits, 0, part)
            ends = offsets[first + 1 : last + 1] - bounds[first]
            result[mine] = torch._grouped_mm(grad[mine], part, offs=ends)
    return result
