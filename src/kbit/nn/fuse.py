"""Fusing matrices that were quantized one by one into one parameter, without changing a value.

Gate and up projections are quantized apart and run as one matrix. Each has its own power-of-two factor.
Nearly always both are 1, and one factor per expert serves. Where they differ, no common one need hold every
block scale exactly, so both are kept, and `KbitExperts` runs gate and up as matrices of their own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kbit.format.tensor import QuantizedTensor
from kbit.ops import api


class Parts(NamedTuple):
    """The stored parts of a quantized parameter.

    packed int32 [..., N, words], absmax [..., N, blocks]; scale float32 [...], or [E, n] for experts fused
    from n matrices with different factors; codebook float32 [2^bits].
    """

    packed: torch.Tensor
    absmax: torch.Tensor
    scale: torch.Tensor
    codebook: torch.Tensor


def parts_of(q: QuantizedTensor) -> Parts:
    """The parts of a quantized tensor, without a copy."""
    return Parts(q.packed, q.absmax, q.scale, q.codebook)


def fuse_rows(stacks: list[QuantizedTensor]) -> Parts:
    """Put stacks of quantized matrices above each other.

    Args:
        stacks: each [E, N_i, K], of one width and scale format.

    Returns:
        Parts with rows sum N_i; scale [E] where each expert's factors agree for all experts, else [E, n].
    """
    packed = torch.cat([stack.packed for stack in stacks], dim=-2)
    absmax = torch.cat([stack.absmax for stack in stacks], dim=-2)
    return Parts(packed, absmax, fuse_factors([stack.scale for stack in stacks]), stacks[0].codebook)


def fuse_factors(columns: list[torch.Tensor]) -> torch.Tensor:
    """Factors of n stacks, float32 [E] each -> [E] where each expert's agree for all experts, else [E, n]."""
    factors = torch.stack(columns, dim=-1)
    if torch.equal(factors, factors[:, :1].expand_as(factors)):
        factors = factors[:, 0]
    return factors.contiguous()


def quantize_fused(
    w: torch.Tensor,
    count: int,
    bits: int,
    codebook: torch.Tensor,
    scale: str,
    search: bool,
    where: str = "",
) -> Parts:
    """Quantize a stack of matrices whose rows are `count` matrices above each other.

    Args:
        w: [E, count * N, K].
        count: how many matrices were fused into one.
        bits, codebook, scale, search, where: as in `kbit.quantize`.

    Raises:
        NonFiniteWeightError, TypeError, ValueError: see `kbit.quantize`.
    """
    settings = (bits, codebook, scale, search)
    return fuse_rows([api.quantize(part, *settings, where=where) for part in w.chunk(count, dim=-2)])
