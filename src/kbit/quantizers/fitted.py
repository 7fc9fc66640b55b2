"""Codebooks of least squared error: Lloyd's algorithm, with block scales as the quantizer chooses them.

Quantize; move each level to where the error of the weights that took it is least; repeat (Lloyd, 1982). With
absmax scales this gives the block-wise optimal floats of Blumenberg et al. (2025).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from kbit.format import bitplanes, type_checks
from kbit.format.autocast import without_autocast
from kbit.format.codebook import BLOCK_SIZE, bits_of, normal_float
from kbit.format.errors import NonFiniteWeightError
from kbit.format.scales import AbsmaxFormat, absmax_format
from kbit.quantizers.scale_search import quantize_blocks

_SAMPLE = 2**19  # weights
_MOST_STEPS = 200
_ENOUGH = 1e-5  # a step that lowers the error by less, relative to it, is the last
# How far levels move, of the way to their optimum: that of all levels together lies beyond.
_STRIDE = 1.7
_LEAST_STEP = 1e-4  # from a level to the next, relative to the largest


def fit_codebook(
    weights: torch.Tensor | Iterable[torch.Tensor],
    bits: int,
    *,
    symmetric: bool = True,
    scale: str = "e4m4",
    search: bool = True,
) -> torch.Tensor:
    """The levels with which `kbit.quantize` has the least squared error on weights like these.

    Half a million weights are used, in blocks drawn from all; each tensor counts by its number of
    weights, whatever their magnitude. The same weights give the same levels.

    Args:
        weights: [..., N, K] of a float dtype, or several; the device of the first computes.
        bits: code width, 2 to 5.
        symmetric: levels mirrored around 0. Of 5 bits, others are slower for few tokens on a GPU.
        scale: format of block scales: "e4m4", "float16" or "float32".
        search: as for `kbit.quantize`.

    Returns:
        float32 [2^bits], a legal codebook, on that device.

    Raises:
        NonFiniteWeightError: weights that were looked at are NaN or Inf.
        TypeError: weights are not dense tensors of a float dtype, or a flag is not True or False.
        ValueError: bits or scale are unknown, or no row has a whole block of 32 weights.
    """
    type_checks.flag("fit_codebook", "symmetric", symmetric)
    type_checks.flag("fit_codebook", "search", search)
    default, fmt = normal_float(bits), absmax_format(str(scale), "fit_codebook")  # a name, not the dtype
    several = isinstance(weights, Iterable) and not isinstance(weights, torch.Tensor)
    blocks = _sample([_checked(weight) for weight in (weights if several else [weights])])
    default = default.to(blocks.device)
    starts = default.double(), _medians(blocks, default, symmetric)
    with without_autocast(blocks.device):
        ends = [_refined(blocks, levels, fmt, search, symmetric) for levels in starts]
    return min(ends, key=lambda end: end[1])[0].float()


def _refined(
    blocks: torch.Tensor, levels: torch.Tensor, fmt: AbsmaxFormat, search: bool, symmetric: bool
) -> tuple[torch.Tensor, float]:
    """Levels that no step from these makes better, float64, and their error."""
    found, goal, error, stride = levels, levels, math.inf, _STRIDE
    for _ in range(_MOST_STEPS):
        best, new_error = _step(blocks, levels, fmt, search, symmetric)
        if new_error < error * (1 - _ENOUGH):
            found, goal, error, stride = levels, best, new_error, _STRIDE
        elif stride == 1:
            break
        else:
            stride = 1.0  # it may have led too far
        levels = _apart(found + stride * (goal - found), symmetric)
    return found, error


def _checked(weight: Any) -> torch.Tensor:
    """A weight that can be fitted to; TypeError for what is none."""
    type_checks.tensor("fit_codebook", "weights", weight)
    if not weight.is_floating_point() or weight.is_meta:
        got = "a tensor on meta, which holds nothing" if weight.is_meta else str(weight.dtype)
        raise TypeError(f"fit_codebook: weights must be of a float dtype, got {got}. Pass unquantized ones.")
    return weight


def _sample(weights: list[torch.Tensor]) -> torch.Tensor:
    """float32 [n, 1, 32]: whole blocks, drawn at random; each tensor's have a mean square of 1."""
    rows = [w.detach().reshape(-1, w.shape[-1]) for w in weights if w.numel() and w.dim()]
    whole = [w[:, : w.shape[1] // BLOCK_SIZE * BLOCK_SIZE].unflatten(1, (-1, BLOCK_SIZE)) for w in rows]
    count = sum(w.shape[0] * w.shape[1] for w in whole)
    if not count:
        shapes = ", ".join(str(list(w.shape)) for w in weights[:4]) or "none"
        raise ValueError(
            f"fit_codebook: weights need a block of {BLOCK_SIZE} in a row, got shapes: {shapes}."
        )
    share, parts = min(1.0, _SAMPLE / BLOCK_SIZE / count), []
    made = torch.Generator().manual_seed(0)
    for blocks in (_drawn(w, share, made).float() for w in whole if w.shape[1]):
        if bad := int((~blocks.isfinite()).sum()):
            raise NonFiniteWeightError(bad, "a sample of the weights")
        size = blocks.double().square().mean().sqrt().float()
        parts.append(torch.where(size > 0, blocks / size, blocks).to(whole[0].device))
    return torch.cat(parts)[:, None]


def _drawn(blocks: torch.Tensor, share: float, made: torch.Generator) -> torch.Tensor:
    """A share of blocks [N, n, 32], as [., 32]; all if it is 1."""
    rows, columns, _ = blocks.shape
    if share == 1:
        return blocks.flatten(0, 1)
    at = torch.randint(rows * columns, (math.ceil(rows * columns * share),), generator=made, device="cpu")
    at = at.to(blocks.device)
    return blocks[at // columns, at % columns]


def _apart(levels: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Levels in order and no two alike, as where many weights are 0; the largest magnitude is 1."""
    steps = levels.diff().clamp(min=_LEAST_STEP * float(levels.abs().max()))
    return _scaled(torch.cat([levels[:1], levels[0] + steps.cumsum(0)]), symmetric)


def _scaled(levels: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Levels whose largest magnitude is 1, mirrored around 0 if asked for."""
    levels = (levels - levels.flip(0)) / 2 if symmetric else levels
    return levels / levels.abs().max()


def _medians(blocks: torch.Tensor, default: torch.Tensor, symmetric: bool) -> torch.Tensor:
    """Levels to begin with, float64: medians of equally likely bins, so that weights take all of them.

    Where numbers are too few for that, the default levels.
    """
    largest = blocks.abs().amax(-1, keepdim=True)
    values = torch.where(largest > 0, blocks / largest, 0).flatten()
    if symmetric:
        values = torch.cat([values, -values])
    count = len(default)
    middles = (torch.arange(count, dtype=torch.float32, device=values.device) + 0.5) / count
    levels = _scaled(values.sort().values[(middles * len(values)).long()].double(), symmetric)
    return levels if bool((levels.diff() > 0).all()) else default.double()


def _step(
    blocks: torch.Tensor, levels: torch.Tensor, fmt: AbsmaxFormat, search: bool, symmetric: bool
) -> tuple[torch.Tensor, float]:
    """Where levels would be best for the codes and scales that they give, float64; and the error so far."""
    codebook, factor = levels.float(), fmt.tensor_factor(blocks.abs().amax(-1))
    packed, stored = quantize_blocks(blocks, codebook, fmt, factor, BLOCK_SIZE, search)
    codes = bitplanes.unpack(packed, bits_of(codebook))[:, None]
    scales = (fmt.decode(stored) * factor).double()[..., None].expand_as(blocks)
    products, squares = scales * blocks, scales.square()
    error = float((blocks - codebook[codes.int()] * scales).square().sum())
    # One level after another: scattered sums on a GPU are not the same every time.
    taken = [codes == code for code in range(len(codebook))]
    above = torch.stack([torch.where(mine, products, 0).sum() for mine in taken])
    below = torch.stack([torch.where(mine, squares, 0).sum() for mine in taken])
    if symmetric:
        above, below = above - above.flip(0), below + below.flip(0)
    return torch.where(below > 0, above / below, levels), error
