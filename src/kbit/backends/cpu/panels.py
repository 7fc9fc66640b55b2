"""Many tokens: decode a panel of rows into cache and let torch's matmul multiply it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kbit.format.autocast import without_autocast

# Rows of weights decoded at a time: 4096 features in bfloat16 make 8 MB, a part of a shared last-level cache.
PANEL_BYTES = 8 << 20


@functools.cache
def _torch_multiplies_bfloat16() -> tuple[bool, bool]:
    """Whether torch's bfloat16 matmul uses AVX-512 dot products here, and whether it uses AMX tiles."""
    amx, avx512 = (
        getattr(torch.cpu, name, lambda: False)()
        for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    )
    return amx or avx512, amx


def panels_win(tokens: int, dtype: torch.dtype, isa: str) -> bool:
    """Whether panels are faster than the fused kernels.

    In float32 and float16 the fused kernels win at any M: 2.2 to 2.5 times faster than torch's matmul at
    256 tokens on Zen 5. In bfloat16 they equal it (0.94 to 1.04 from 64 to 512 tokens, 4096 -> 14336) where
    they have dot products themselves; torch is faster where they do not (at 64 tokens AVX2 takes 34 ms,
    panels decoded by AVX2 23), and is taken to be with AMX, which is not measured.
    """
    if tokens < 32 or dtype != torch.bfloat16:
        return False
    fast, amx = _torch_multiplies_bfloat16()
    return amx or (fast and isa != "avx512")


def linear_by_panels(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    decode: Callable[[int, int, torch.Tensor], None],
) -> None:
    """out [M, N] = x [M, K] @ W.T (+ bias), W decoded panel by panel.

    Args:
        x: [M, K], bfloat16 or float32.
        bias: [N] of x's dtype, or None.
        out: [M, N] of x's dtype.
        rows: N.
        decode: `decode(begin, end, panel)` writes rows begin to end into panel [end - begin, K].
    """
    features = x.shape[1]
    height = min(rows, max(64, PANEL_BYTES // (features * x.itemsize) // 64 * 64))
    panel = x.new_empty(height, features)
    with without_autocast(x.device):
        for begin in range(0, rows, height):
            end = min(rows, begin + height)
            decode(begin, end, panel)
            part = None if bias is None else bias[begin:end]
            out[:, begin:end] = torch.nn.functional.linear(x, panel[: end - begin], part)
