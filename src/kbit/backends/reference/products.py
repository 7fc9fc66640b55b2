"""What the ops on canonical and on tiled weights share: chunks of rows, products, gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kbit.format.autocast import without_autocast
from kbit.format.layout import TILE_ROWS

_CHUNK_WEIGHTS = 8 * 2**20
# On a GPU 256 MB of 16-bit weights, more than a layer of most models: each chunk more is a pass over the
# result of `grad_input`.
GPU_CHUNK_WEIGHTS = 128 * 2**20

# Where cuBLAS splits K of a 16-bit product, it may leave out columns behind the last whole step of 64: that
# of CUDA 13.0 on Hopper, with few rows or columns, for K of 11528 and some 20 others up to 24000. Other
# versions do for other K, and other GPUs may have longer steps.
_STEP, _LONGEST_WHOLE = 128, 4096

Decode = Callable[[int, torch.Tensor], None]


def whole_steps(in_features: int) -> int:
    """Columns that 16-bit operands of cuBLAS need, the last of them zeros, so that it leaves out none."""
    return in_features + (-in_features % _STEP if in_features > _LONGEST_WHOLE else 0)


def in_whole_steps(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Operands [..., K] of a product on any device, padded where cuBLAS might leave out columns."""
    missing = whole_steps(operands[0].shape[-1]) - operands[0].shape[-1]
    if not missing or not operands[0].is_cuda or operands[0].dtype == torch.float32:
        return operands
    return tuple(F.pad(each, (0, missing)) for each in operands)


def matmul(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ w.T + bias, accumulated in float32 and rounded once; in x's dtype, whatever autocast's is."""
    with without_autocast(x.device):
        if x.is_cuda:
            # cuBLAS accumulates in float32 and rounds once.
            x, w = in_whole_steps(x, w)
            return F.linear(x, w, bias)
        y = F.linear(x.float(), w.float(), None if bias is None else bias.float())
        return y.to(x.dtype)


def grad_input(grad: torch.Tensor, in_features: int, decode: Decode) -> torch.Tensor:
    """grad [M, N] @ W -> [M, K], summed in float32, over chunks of N too, and rounded once.

    Args:
        grad: float32, float16 or bfloat16.
        in_features: K.
        decode: decode(first, panel) writes W's rows from `first` on into a panel [rows, K] of grad's dtype.
    """
    count, out_features = grad.shape
    rows = rows_at_once(in_features, GPU_CHUNK_WEIGHTS if grad.is_cuda else _CHUNK_WEIGHTS)
    panel = grad.new_empty((min(rows, out_features), in_features))
    if count and rows >= out_features:
        decode(0, panel)
        return matmul(grad, panel.t(), None)
    total = grad.new_zeros((count, in_features), dtype=torch.float32)
    for first in range(0, out_features if count else 0, rows):
        part = panel[: min(rows, out_features - first)]
        decode(first, part)
        _add_product(total, grad[:, first : first + rows], part)
    return total.to(grad.dtype)


def _add_product(total: torch.Tensor, grad: torch.Tensor, w: torch.Tensor) -> None:
    """total += grad @ w, with `total` float32: a product in grad's dtype would round every chunk."""
    with without_autocast(grad.device):
        if grad.is_cuda and grad.dtype != torch.float32:
            grad, columns = in_whole_steps(grad, w.t())
            total += torch.mm(grad, columns.t(), out_dtype=torch.float32)
        else:
            total.addmm_(grad.float(), w.float())


def grouped_grad_input(
    grad: torch.Tensor, expert_offsets: torch.Tensor, in_features: int, decoder: Callable[[int], Decode]
) -> torch.Tensor:
    """grad [T, N] -> [T, K], expert by expert; decoder(expert) is as `decode` in `grad_input`."""
    result = grad.new_zeros((grad.shape[0], in_features))
    for expert, rows in groups(expert_offsets):
        result[rows] = grad_input(grad[rows], in_features, decoder(expert))
    return result


def groups(expert_offsets: torch.Tensor) -> list[tuple[int, slice]]:
    """Experts that have rows, with those rows. Reads the offsets on the host."""
    bounds = enumerate(itertools.pairwise(expert_offsets.tolist()))
    return [(expert, slice(first, last)) for expert, (first, last) in bounds if last > first]


def rows_at_once(in_features: int, weights: int = _CHUNK_WEIGHTS) -> int:
    """Rows of W that are decoded at a time, of so many weights; a multiple of a tile's rows."""
    rows = weights // max(1, in_features) // TILE_ROWS * TILE_ROWS
    return max(TILE_ROWS, rows)
