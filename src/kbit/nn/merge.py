"""Fusing quantized matrices that were quantized one by one, without changing a value.

Gate and up projections are quantized apart, each with its own power-of-two factor, and run as one matrix,
which has one factor. Nearly always both factors are 1. Where they differ, block scales are written anew for
a common factor, if the scale format holds every one of them exactly.
"""

from __future__ import annotations

import torch

from kbit.format.scales import AbsmaxFormat, absmax_format
from kbit.format.tensor import QuantizedTensor
from kbit.ops import api


def quantize_halves(
    w: torch.Tensor,
    halves: int,
    bits: int,
    codebook: torch.Tensor,
    scale: str,
    search: bool,
    where: str = "",
) -> QuantizedTensor:
    """Quantize a stack of matrices whose rows are `halves` matrices above each other.

    Args:
        w: [E, halves * N, K].
        halves: how many matrices were fused into one.
        bits, codebook, scale, search, where: as in `kbit.quantize`.

    Returns:
        A QuantizedTensor of w's shape.

    Raises:
        NonFiniteWeightError, TypeError, ValueError: see `kbit.quantize` and `merge_rows`.
    """
    parts = [
        api.quantize(part, bits, codebook, scale, search, where=where) for part in w.chunk(halves, dim=-2)
    ]
    return merge_rows(parts, where)


def merge_rows(parts: list[QuantizedTensor], where: str = "") -> QuantizedTensor:
    """Put quantized matrices of equal K above each other.

    Args:
        parts: each [N_i, K] or [E, N_i, K], of one width and scale format.
        where: name of the result, for the message.

    Returns:
        [sum N_i, K] or [E, sum N_i, K]; it decodes to exactly what the parts decode to.

    Raises:
        ValueError: the parts' factors differ and no common one holds every block scale exactly.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    factor, absmax = _common_factor([p.absmax for p in parts], [p.scale for p in parts], where)
    packed = torch.cat([part.packed for part in parts], dim=-2)
    rows = sum(part.shape[-2] for part in parts)
    shape = (*first.shape[:-2], rows, first.shape[-1])
    return QuantizedTensor(packed, absmax, first.codebook, factor, first.bits, shape)


def _common_factor(
    absmax: list[torch.Tensor], factors: list[torch.Tensor], where: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """One factor per matrix, and the block scales [..., rows, blocks] written for it."""
    if all(torch.equal(factor, factors[0]) for factor in factors):
        return factors[0], torch.cat(absmax, dim=-2)
    fmt = absmax_format(absmax[0].dtype)
    if factors[0].dim() == 0:
        factor, merged = _rescale([(a, f.item()) for a, f in zip(absmax, factors, strict=True)], fmt, where)
        return factors[0].new_tensor(factor), merged
    rescaled = [
        _rescale(
            [(a[e], f[e].item()) for a, f in zip(absmax, factors, strict=True)], fmt, f"{where} of expert {e}"
        )
        for e in range(len(factors[0]))
    ]
    return factors[0].new_tensor([f for f, _ in rescaled]), torch.stack([a for _, a in rescaled])


def _rescale(
    matrices: list[tuple[torch.Tensor, float]], fmt: AbsmaxFormat, where: str
) -> tuple[float, torch.Tensor]:
    """Find the largest power of two for which all block scales stay exact."""
    factors = [factor for _, factor in matrices]
    candidate = max(factors)
    while candidate >= min(factors):
        moved = [_encode_exactly(a, factor, candidate, fmt) for a, factor in matrices]
        if all(m is not None for m in moved):
            return candidate, torch.cat([m for m in moved if m is not None], dim=-2)
        candidate /= 2
    raise ValueError(
        f"{where or 'merged weight'}: its matrices have scale factors {factors}, and no common one holds all "
        f"block scales in {fmt.name} exactly. Quantize with absmax_format='float32', or leave this module "
        f"out (modules_to_not_convert)."
    )


def _encode_exactly(
    absmax: torch.Tensor, factor: float, target: float, fmt: AbsmaxFormat
) -> torch.Tensor | None:
    """`absmax` written for another factor, or None if that would round."""
    values = fmt.decode(absmax).double() * (factor / target)
    stored = fmt.encode(values.float())
    return stored if bool((fmt.decode(stored).double() == values).all()) else None
