"""Every op in pure PyTorch, on any device: decode, then multiply.

It is the definition that other backends are tested against, and what runs where no kernel was built. Rows
of W are decoded in chunks, so the 16-bit copy never exists whole.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from kbit import quantizers
from kbit.format import reference as fmt
from kbit.format.errors import NonFiniteWeightError

_CHUNK_WEIGHTS = 8 * 2**20


def quantize(
    w: torch.Tensor, codebook: torch.Tensor, bits: int, absmax_format: str, search: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kbit::quantize`. Raises NonFiniteWeightError for NaN or Inf, before anything is computed."""
    bad = sum(int((~torch.isfinite(rows)).sum()) for rows in w.flatten(0, -2).split(_rows(w.shape[-1])))
    if bad:
        raise NonFiniteWeightError(bad)
    return quantizers.quantize(w, codebook, absmax_format, search)


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::dequantize` into `out` [..., N, K]."""
    if packed.dim() == 3:
        for expert in range(packed.shape[0]):
            dequantize(packed[expert], absmax[expert], codebook, scale[expert], in_features, out[expert])
        return out
    rows = _rows(in_features)
    for first in range(0, packed.shape[0], rows):
        part = slice(first, first + rows)
        out[part] = fmt.dequantize(packed[part], absmax[part], codebook, scale, in_features, out.dtype)
    return out


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::linear` into `out` [M, N]; x is [M, K]."""
    rows = _rows(in_features)
    for first in range(0, packed.shape[0], rows):
        part = slice(first, first + rows)
        w = fmt.dequantize(packed[part], absmax[part], codebook, scale, in_features, x.dtype)
        out[:, part] = _matmul(x, w, None if bias is None else bias[part])
    return out


def _matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if x.is_cuda:
        # cuBLAS accumulates in float32 and rounds once.
        return F.linear(x, w, bias)
    y = F.linear(x.float(), w.float(), None if bias is None else bias.float())
    return y.to(x.dtype)


def linear_grad_input(
    grad: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
) -> torch.Tensor:
    """`kbit::linear_grad_input`: grad [M, N] @ W -> [M, K], summed over chunks of N in float32."""
    total = grad.new_zeros((grad.shape[0], in_features), dtype=torch.float32)
    rows = _rows(in_features)
    for first in range(0, packed.shape[0], rows):
        part = slice(first, first + rows)
        w = fmt.dequantize(packed[part], absmax[part], codebook, scale, in_features, grad.dtype)
        total += _matmul(grad[:, part], w.t(), None)
    return total.to(grad.dtype)


def embedding(
    ids: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::embedding` into `out` [T, K]; ids is [T]."""
    rows = packed.shape[0]
    if not ids.is_cuda and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= rows):
        position = int(((ids < 0) | (ids >= rows)).int().argmax())
        raise IndexError(
            f"embedding: id {int(ids[position])} at position {position} is outside 0..{rows - 1}"
        )
    return out.copy_(fmt.dequantize(packed[ids], absmax[ids], codebook, scale, in_features, out.dtype))


def grouped_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """`kbit::grouped_linear` into `out` [T, N]. Reads the offsets on the host."""
    out.zero_()
    for expert, rows in _groups(expert_offsets):
        weight = (packed[expert], absmax[expert], codebook, scale[expert])
        linear(x[rows], *weight, None, in_features, out[rows])
    return out


def grouped_linear_grad_input(
    grad: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    in_features: int,
) -> torch.Tensor:
    """`kbit::grouped_linear_grad_input`: grad [T, N] -> [T, K], expert by expert."""
    result = grad.new_zeros((grad.shape[0], in_features))
    for expert, rows in _groups(expert_offsets):
        weight = (packed[expert], absmax[expert], codebook, scale[expert])
        result[rows] = linear_grad_input(grad[rows], *weight, in_features)
    return result


def _groups(expert_offsets: torch.Tensor) -> list[tuple[int, slice]]:
    """Experts that have rows, with those rows."""
    bounds = enumerate(itertools.pairwise(expert_offsets.tolist()))
    return [(expert, slice(first, last)) for expert, (first, last) in bounds if last > first]


def _rows(in_features: int) -> int:
    return max(1, _CHUNK_WEIGHTS // max(1, in_features))
