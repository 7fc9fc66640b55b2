"""Sorting by expert, gathering and combining; `kbit.nvfp4.kernels.Kernels` states what they compute."""

from __future__ import annotations

import torch

from kbit.nvfp4.reference.quantize import quantize


def align(
    ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Kernels.align`."""
    flat = ids.flatten().long()
    flat = torch.where((flat < 0) | (flat > num_experts), num_experts, flat)
    ordered, slots = torch.sort(flat, stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=ids.device))
    inverse = torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device=ids.device))
    source = torch.div(slots, max(1, ids.shape[1]), rounding_mode="floor")
    return source.int(), slots.int(), bounds.int(), inverse.view(ids.shape).int()


def gather_rows(
    codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.gather_rows`."""
    return codes[rows], scales[rows]


def quantize_scatter(
    x: torch.Tensor, slots: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Kernels.quantize_scatter`."""
    codes, scales = quantize(x, search, ties_even, global_scale)
    all_codes = codes.new_empty(slots.numel(), codes.shape[1])
    all_scales = scales.new_empty(slots.numel(), scales.shape[1])
    for column in slots.long().unbind(1):
        all_codes[column], all_scales[column] = codes, scales
    return all_codes, all_scales


def combine(y: torch.Tensor, inverse: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """See `Kernels.combine`."""
    total = torch.zeros(len(inverse), y.shape[1], dtype=torch.float32, device=y.device)
    for rows, weights in zip(inverse.long().unbind(1), p.unbind(1), strict=True):
        total = total + y[rows].float() * weights[:, None]
    return total.to(y.dtype)
