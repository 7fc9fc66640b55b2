"""Every op in pure PyTorch, on any device: decode, then multiply.

It is the definition that other backends are tested against, and what runs where no kernel was built. Rows
of W are decoded in chunks, so the 16-bit copy never exists whole.
"""

from __future__ import annotations

import torch

from kbit import quantizers
from kbit.backends.reference.attention import attention_step
from kbit.backends.reference.attention_rests import attention_rest
from kbit.backends.reference.caches import cache_append
from kbit.backends.reference.gated_delta import (
    gated_delta_inputs,
    gated_delta_output,
    gated_delta_rule,
    gated_delta_step,
)
from kbit.backends.reference.heads import append_heads
from kbit.backends.reference.latent import latent_attention_step, latent_heads
from kbit.backends.reference.masks import causal_mask
from kbit.backends.reference.moe import moe_align, moe_combine, moe_logits, moe_route
from kbit.backends.reference.norm import rms_norm
from kbit.backends.reference.position import rotary, rotary_angles
from kbit.backends.reference.products import grad_input, grouped_grad_input, groups, matmul, rows_at_once
from kbit.backends.reference.tiled import (
    dequantize_tiled,
    experts_tiled,
    grouped_linear_tiled,
    linear_tiled,
)
from kbit.format import reference as fmt
from kbit.format.errors import NonFiniteWeightError
from kbit.format.layout import from_tiled, to_tiled

__all__ = [
    "append_heads",
    "attention_rest",
    "attention_step",
    "cache_append",
    "causal_mask",
    "dequantize",
    "dequantize_tiled",
    "embedding",
    "experts_tiled",
    "from_tiled",
    "gated_delta_inputs",
    "gated_delta_output",
    "gated_delta_rule",
    "gated_delta_step",
    "grad_input",
    "grouped_grad_input",
    "grouped_linear",
    "grouped_linear_tiled",
    "latent_attention_step",
    "latent_heads",
    "linear",
    "linear_tiled",
    "moe_align",
    "moe_combine",
    "moe_logits",
    "moe_route",
    "quantize",
    "rms_norm",
    "rotary",
    "rotary_angles",
    "to_tiled",
]


def quantize(
    w: torch.Tensor, codebook: torch.Tensor, absmax_format: str, search: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`kbit::quantize`. Raises NonFiniteWeightError for NaN or Inf, before anything is computed."""
    chunks = w.flatten(0, -2).split(rows_at_once(w.shape[-1]))
    bad = sum(int((~torch.isfinite(rows)).sum()) for rows in chunks)
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
    rows = rows_at_once(in_features)
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
    rows = rows_at_once(in_features)
    for first in range(0, packed.shape[0], rows):
        part = slice(first, first + rows)
        w = fmt.dequantize(packed[part], absmax[part], codebook, scale, in_features, x.dtype)
        out[:, part] = matmul(x, w, None if bias is None else bias[part])
    return out


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
    for expert, rows in groups(expert_offsets):
        weight = (packed[expert], absmax[expert], codebook, scale[expert])
        linear(x[rows], *weight, None, in_features, out[rows])
    return out
