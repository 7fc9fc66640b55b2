"""How codes and scales are chosen. `quantize` is the reference that every backend equals bit for bit."""

from __future__ import annotations

import torch

from kbit.format import reference
from kbit.format.autocast import without_autocast
from kbit.format.scales import absmax_format
from kbit.quantizers.scale_search import quantize_blocks

# Rows are processed in chunks so that float32 temporaries stay near this many weights.
_CHUNK_WEIGHTS = 4 * 2**20


def quantize(
    w: torch.Tensor, codebook: torch.Tensor, absmax_format_name: str, search: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize weights in pure PyTorch.

    Args:
        w: [N, K] or [E, N, K], float32, float16 or bfloat16, finite.
        codebook: float32 [2^bits] on w's device.
        absmax_format_name: a name in `kbit.format.scales.ABSMAX_FORMATS`.
        search: search the scale (default quantizer) or take the rounded absmax (plain).

    Returns:
        packed int32 [..., N, blocks * bits], absmax [..., N, blocks], scale float32 [...].
    """
    with without_autocast(w.device):  # which would refuse to join float16 scales
        if w.dim() == 2:
            return _quantize_matrix(w, codebook, absmax_format_name, search)
        # Without an expert one of zeros says what the parts of none are like.
        matrices = w.unbind(0) if w.shape[0] else [w.new_zeros(w.shape[1:])]
        each = [_quantize_matrix(m, codebook, absmax_format_name, search) for m in matrices]
        packed, scales, factors = (torch.stack(part)[: w.shape[0]] for part in zip(*each, strict=True))
        return packed, scales, factors


def _quantize_matrix(
    w: torch.Tensor, codebook: torch.Tensor, absmax_format_name: str, search: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fmt = absmax_format(absmax_format_name)
    chunks = w.split(max(1, _CHUNK_WEIGHTS // max(1, w.shape[-1])))
    largest = torch.cat([reference.split_blocks(chunk).abs().amax(-1) for chunk in chunks])
    factor = fmt.tensor_factor(largest)
    how = (codebook, fmt, factor, w.shape[-1], search)
    pairs = [quantize_blocks(reference.split_blocks(chunk), *how) for chunk in chunks]
    return torch.cat([p for p, _ in pairs]), torch.cat([s for _, s in pairs]), factor
