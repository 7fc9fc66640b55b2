"""Products with weights in tiles on the CPU, which takes the tiles apart; see `kbit.nvfp4.kernels`."""

from __future__ import annotations

import torch

from kbit.backends.reference.products import groups
from kbit.nvfp4.formats import layouts
from kbit.nvfp4.reference.gemm import gemm, linear, moe_gemm


def gemm_tiled(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    tiled: torch.Tensor,
    out_features: int,
    w_scale: float,
    row_scale: torch.Tensor | None,
    accum: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `Kernels.gemm_tiled`."""
    w = layouts.to_nv(tiled, "tiled", 2 * a_codes.shape[1], out_features)
    return gemm(a_codes, a_scales, *w, w_scale, row_scale, accum, out_dtype)


def linear_tiled(
    x: torch.Tensor, tiled: torch.Tensor, out_features: int, w_scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `Kernels.linear_tiled`."""
    w = layouts.to_nv(tiled, "tiled", x.shape[1], out_features)
    return linear(x, *w, w_scale, bias)


def moe_gemm_tiled(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    rows: torch.Tensor | None,
    bounds: torch.Tensor,
    tiled: torch.Tensor,
    out_features: int,
    w_scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    accum: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `Kernels.moe_gemm_tiled`."""
    w = layouts.to_nv(tiled, "tiled", 2 * a_codes.shape[1], out_features)
    return moe_gemm(a_codes, a_scales, rows, bounds, *w, w_scale, row_scale, accum, out_dtype)


def moe_linear_tiled(
    x: torch.Tensor, bounds: torch.Tensor, tiled: torch.Tensor, out_features: int, w_scale: torch.Tensor
) -> torch.Tensor:
    """See `Kernels.moe_linear_tiled`."""
    y = x.new_zeros(len(x), out_features)
    for expert, rows in groups(bounds):
        y[rows] = linear_tiled(x[rows], tiled[expert], out_features, float(w_scale[expert]), None)
    return y
