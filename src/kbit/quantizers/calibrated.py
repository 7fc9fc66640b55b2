"""Quantizing by what a layer is fed: the columns still to come make up for the error of those that are done.

GPTQ (Frantar et al., 2022) on this format: blocks of 32 columns, left to right. A block's scales are chosen
when its turn comes, by the weights as they are then. Afterwards the error of each column, weighed by the
inverse of H = sum of x x^T over activations x, is spread over the columns behind it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from kbit.format import bitplanes, reference
from kbit.format.codebook import BLOCK_SIZE, bits_of, midpoints
from kbit.format.scales import absmax_format
from kbit.quantizers.scale_search import quantize_blocks

# Of the mean of H's diagonal, added to it: with few activations H has no inverse. The usual 0.01 follows
# samples too closely that are few or of another kind: of a 41 M parameter model at 3 bits, calibrated by 18
# thousand tokens of other prose, the divergence was 0.0596 by that and is 0.0511; by 32 thousand of its own
# kind 0.0388 and 0.0386. Columns by falling diagonal, block by block, changed neither.
_DAMPING = 0.1
# The same, times K, divided by the number of activations: as far as that is small, what columns seem to share
# is chance. With 512 tokens, and 2 bits, the divergence was 0.277 without this and 0.252 without calibration;
# with this it is 0.243. With 32 thousand it changed nothing, for K of 192 and 512.
_DAMPING_OF_FEW = 1.0


def spread_of(hessian: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """How errors of columns spread: U of H^-1 = U^T U; the identity where there was no activation.

    Args:
        hessian: float32 [..., K, K], the sum of x x^T over activations x [K]; finite.
        count: [...], of activations; the fewer, the less is spread.

    Returns:
        float32 [..., K', K'], upper triangular; K' is K rounded up to whole blocks.
    """
    padding = -hessian.shape[-1] % BLOCK_SIZE
    h = F.pad(hessian.double(), (0, padding, 0, padding))
    diagonal = h.diagonal(dim1=-2, dim2=-1)
    mean = diagonal.mean(-1, keepdim=True)
    few = _DAMPING_OF_FEW * hessian.shape[-1] / count.to(diagonal).clamp(min=1)[..., None]
    diagonal += torch.where(mean > 0, few.clamp(min=_DAMPING) * mean, 1.0)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()


# Quantizes [..., N, columns] by itself, as `torch.ops.kbit.quantize`: packed, absmax, factors.
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def quantize(
    w: torch.Tensor,
    spread: torch.Tensor,
    codebook: torch.Tensor,
    absmax_format_name: str,
    search: bool,
    alone: Quantize | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights such that their products with activations like those that were seen change little.

    Args:
        w: [..., N, K], float32, float16 or bfloat16, finite.
        spread: float32 [..., K', K'] on w's device, see `spread_of`.
        codebook: float32 [2^bits] on w's device.
        absmax_format_name: a name in `kbit.format.scales.ABSMAX_FORMATS`.
        search: search block scales, or take the rounded absmax.
        alone: what quantizes a block's weights by themselves, with this codebook, format and `search`: where
            a compiled kernel does, block scales are there several times as soon.

    Returns:
        packed int32 [..., N, blocks * bits], absmax [..., N, blocks], scale float32 [...].
    """
    fmt = absmax_format(absmax_format_name)
    rest = reference.split_blocks(w).clone()  # which may be w's own memory
    factor = fmt.tensor_factor(rest.abs().amax(-1))
    rest = rest.flatten(-2)
    thresholds = midpoints(codebook)
    packed, stored = [], []
    for start in range(0, rest.shape[-1], BLOCK_SIZE):
        end = start + BLOCK_SIZE
        block = rest[..., start:end]
        left = min(BLOCK_SIZE, w.shape[-1] - start)
        divided = block / factor[..., None, None]
        chosen = None if alone is None else _chosen(divided[..., :left], alone)
        if chosen is None:
            one = torch.ones_like(factor)
            _, chosen = quantize_blocks(divided.unsqueeze(-2), codebook, fmt, one, left, search)
        stored.append(chosen)
        scale = (fmt.decode(chosen) * factor[..., None, None]).squeeze(-1)
        codes, errors = _columns(block, scale, spread[..., start:end, start:end], codebook, thresholds)
        packed.append(bitplanes.pack(codes, bits_of(codebook)))
        rest[..., end:] -= errors @ spread[..., start:end, end:]
    return torch.cat(packed, dim=-1), torch.cat(stored, dim=-1), factor


def _columns(
    block: torch.Tensor,
    scale: torch.Tensor,
    spread: torch.Tensor,
    codebook: torch.Tensor,
    thresholds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of a block [..., N, 32], column after column, and the weighed errors that they leave.

    `scale` is [..., N]. Columns come first meanwhile, as the many small steps want them beside each other in
    memory. Codes are counted, not searched for: that a CPU splits over threads, who wait for each other.
    """
    rest, weights = block.movedim(-1, 0).contiguous(), spread.movedim((-2, -1), (0, 1)).unsqueeze(-1)
    limits, there = thresholds.view(-1, *[1] * scale.dim()), scale > 0
    codes, errors = torch.empty_like(rest, dtype=torch.uint8), torch.empty_like(rest)
    for i in range(BLOCK_SIZE):
        normalized = torch.where(there, rest[i] / scale, 0.0)
        code = (normalized > limits).sum(0)
        codes[i] = code
        torch.div(rest[i] - codebook[code] * scale, weights[i, i], out=errors[i])
        rest[i + 1 :] -= errors[i] * weights[i, i + 1 :]
    return codes.movedim(0, -1).contiguous(), errors.movedim(0, -1).contiguous()


def _chosen(block: torch.Tensor, alone: Quantize) -> torch.Tensor | None:
    """The block scales of weights that were divided by their matrix's factor; None if they want another."""
    _, stored, factors = alone(block)
    return stored if bool((factors == 1).all()) else None
