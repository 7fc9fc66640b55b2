"""Many tokens: decode a panel of rows into cache and let torch's matmul multiply it."""

from __future__ import annotations

from collections.abc import Callable

import torch

# Rows of weights decoded at a time: 4096 features in bfloat16 make 8 MB, a part of a shared last-level cache.
PANEL_BYTES = 8 << 20


def panels_win(tokens: int, dtype: torch.dtype, index: int, names: Callable[[], list[str]]) -> bool:
    """Whether panels are faster than the fused kernels."""
    return False


def linear_by_panels(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    rows: int,
    decode: Callable[[int, int, torch.Tensor], None],
) -> None:
    """out [M, N] = x [M, K] @ W.T (+ bias), W decoded panel by panel.

    Float16 goes through float32 panels that hold weights rounded to float16: torch may accumulate float16
    products in float16.

    Args:
        x: [M, K].
        bias: [N] of x's dtype, or None.
        out: [M, N] of x's dtype.
        rows: N.
        decode: `decode(begin, end, panel)` writes rows begin to end into panel [end - begin, K].
    """
    compute = torch.float32 if x.dtype == torch.float16 else x.dtype
    activations = x.to(compute)
    # Bias is added in float32 before the one rounding, except where torch fuses it into the matmul itself.
    features = x.shape[1]
    height = min(rows, max(64, PANEL_BYTES // (features * compute.itemsize) // 64 * 64))
    panel = torch.empty(height, features, dtype=compute)
    for begin in range(0, rows, height):
        end = min(rows, begin + height)
        decode(begin, end, panel)
        part = None if bias is None else bias[begin:end].to(compute)
        out[:, begin:end] = torch.nn.functional.linear(activations, panel[: end - begin], part)
