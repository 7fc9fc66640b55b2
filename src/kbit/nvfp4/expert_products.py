"""Mixture of experts: the products of sorted rows with their experts."""

from __future__ import annotations

import torch

from kbit.backends.reference.products import groups
from kbit.format.words import at
from kbit.nvfp4.formats import NVFP4Tensor, check_nvfp4
from kbit.nvfp4.gemm import TILED_ACCUMULATIONS, check_product, check_tile, linear_nvfp4
from kbit.nvfp4.kernels import kernels_for
from kbit.nvfp4.moe import ExpertInput, Routing, quantize_for_experts, route


def expert_product(
    a: ExpertInput,
    routing: Routing,
    w: NVFP4Tensor,
    accum: str = "exact",
    out_dtype: torch.dtype = torch.bfloat16,
    tile: str | None = None,
    where: str = "",
) -> torch.Tensor:
    """Multiply each sorted row with its expert.

    Args:
        a: see `quantize_for_experts`.
        routing: the one that `a` was made with.
        w: [E, N, K]. "tiled" is the fastest under "exact" and "tc" on Hopper GPUs; elsewhere, and under
            "seq16", a layout other than "nv" is converted at every call.
        accum, out_dtype, tile, where: as in `gemm_nvfp4`.

    Returns:
        out_dtype [R, N] in sorted order; rows of no expert are 0.

    Raises:
        TypeError, ValueError: the arguments do not fit.
    """
    check_product(a.tensor, w, accum, out_dtype, "moe_gemm_nvfp4", where)
    if len(w.shape) != 3 or len(routing.bounds) != w.shape[0] + 1:
        raise ValueError(
            f"moe_gemm_nvfp4: w must be [{len(routing.bounds) - 1}, N, K] for this routing, got {w.shape}"
            f"{at(where)}. One matrix goes to linear_nvfp4 or gemm_nvfp4."
        )
    # Rounded to float32 as in gemm_nvfp4. A 0-dim CPU tensor multiplies on any device without a wait.
    scale = w.global_scale * a.tensor.global_scale
    kernels = kernels_for(a.tensor.codes, rows=a.rows, routing=routing.bounds)
    check_tile(tile, accum, kernels, "moe_gemm_nvfp4")
    operands, row_scale = (*a.tensor.nv(), a.rows, routing.bounds), a.tensor.row_scale
    if w.layout == "tiled" and accum in TILED_ACCUMULATIONS and tile is None:
        tiles = w.codes, w.shape[1]
        return kernels.moe_gemm_tiled(*operands, *tiles, scale, row_scale, accum, out_dtype)
    return kernels.moe_gemm(*operands, *w.nv(), scale, row_scale, accum, out_dtype, tile)


def expert_linear(x: torch.Tensor, routing: Routing, w: NVFP4Tensor, where: str = "") -> torch.Tensor:
    """Multiply each sorted row, not quantized, with its expert (W4A16).

    Weights in layout "tiled" are multiplied as they are on Hopper GPUs, by x in 16 bits. Others are decoded,
    expert by expert; finding out which have any rows waits for the device.

    Args:
        x: float16, bfloat16 or float32 [R, K] in sorted order.
        routing: of R rows.
        w: [E, N, K].
        where: name of the layer, for messages.

    Returns:
        x's dtype [R, N] in sorted order; rows of no expert are 0.
    """
    if w.layout == "tiled":
        kernels = kernels_for(x, w=w.codes, routing=routing.bounds)
        return kernels.moe_linear_tiled(x, routing.bounds, w.codes, w.shape[1], w.global_scale)
    y = x.new_zeros(len(x), w.shape[1])
    for expert, rows in groups(routing.bounds):
        y[rows] = linear_nvfp4(x[rows], w.expert(expert), where=where)
    return y


def moe_gemm_nvfp4(
    x: torch.Tensor,
    w: NVFP4Tensor,
    ids: torch.Tensor,
    dedup: str = "off",
    accum: str = "exact",
    out_dtype: torch.dtype | None = None,
    search: bool = True,
    ties: str = "zero",
    global_scale: float | None = None,
) -> torch.Tensor:
    """y[t, u] = quantized x[t] (or x[t, u]) times expert ids[t, u].

    Args:
        x: float16, bfloat16 or float32 [T, K] or [T, U, K].
        w: [E, N, K]. "tiled" is the fastest under "exact" and "tc" on Hopper GPUs; elsewhere, and under
            "seq16", a layout other than "nv" is converted at every call.
        ids: int32 or int64 [T, U]; E gives zeros.
        dedup: "off", "gather", "scatter" or "indirect"; see `quantize_for_experts`.
        accum: see `gemm_nvfp4`.
        out_dtype: x's if None.
        search, ties, global_scale: as in `quantize_nvfp4`.

    Returns:
        out_dtype [T, U, N].

    Raises:
        TypeError, ValueError: the arguments do not fit.
    """
    check_nvfp4("moe_gemm_nvfp4", "w", w)
    routing = route(ids, w.shape[0], op="moe_gemm_nvfp4")
    a = quantize_for_experts(x, routing, dedup, search, ties, global_scale)
    y = expert_product(a, routing, w, accum, x.dtype if out_dtype is None else out_dtype)
    return y[routing.inverse]
