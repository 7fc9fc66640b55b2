"""Mixture of experts: sorting by expert, the product of sorted rows, the sum. Bits: `kbit.nvfp4.kernels`."""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, operands, routing, wgmma
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import exact, exact_wgmma
from kbit.backends.cuda.nvfp4 import products as dense
from kbit.backends.cuda.nvfp4.constants import CODEBOOK, constant
from kbit.backends.cuda.nvfp4.launch import run_items
from kbit.backends.cuda.nvfp4.tiled import linear_tiled
from kbit.backends.cuda.weights import ready
from kbit.backends.dtype_codes import DTYPES
from kbit.backends.reference.products import groups
from kbit.format import nvfp4_layout

SLOTS = KernelSpec("nvfp4_slots.cu")
FEW_ROWS = 64  # of all experts in tiles, up to which each is multiplied for itself


def specs() -> list[KernelSpec]:
    """Every kernel of this module that is not of another one."""
    return [SLOTS]


def align(
    ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.align`: csrc/moe_align.cu, and the inverse of its inverse."""
    source, slots = ids.new_empty(ids.numel()), ids.new_empty(ids.numel())
    bounds, inverse = ids.new_empty(num_experts + 1), torch.empty_like(ids)
    routing.moe_align(ids, source, bounds, inverse)
    args = (*operands.addresses(inverse, slots), ids.numel())
    run_items(SLOTS, "QQi", ids.device, ids.numel(), args)
    return source, slots, bounds, inverse


def combine(y: torch.Tensor, inverse: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.combine`: csrc/moe_combine.cu."""
    out = y.new_empty((inverse.shape[0], y.shape[1]))
    if out.numel():
        routing.moe_combine(y, inverse, p, None, out)
    return out


def token_tile(count: int, experts: int) -> int:
    """Tokens of a tile: the mean of rows per expert, rounded up; the host does not know how they lie."""
    return dense.chosen_tokens(-(-count // experts))


def most_tiles(count: int, experts: int, tokens: int) -> int:
    """Most tiles that `count` rows of any experts, and of none, can fall into."""
    parts = min(experts + 1, count)
    return (count + parts * (tokens - 1)) // tokens


def moe_gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    rows: torch.Tensor | None,
    bounds: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    w_scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    accum: str,
    out_dtype: torch.dtype,
    tile: str | None = None,
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.moe_gemm`. One launch; tiles that no expert needs return at once.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: K is larger than 2^20, or there are too many rows.
    """
    count = a_codes.shape[0] if rows is None else rows.shape[0]
    experts, n = w_codes.shape[:2]
    y = a_codes.new_empty((count, n), dtype=out_dtype)
    if y.numel() == 0:
        return y
    padded = dense.padded_operands(a_codes, a_scales, w_codes, w_scales)
    columns = padded[0].shape[-1] * 2
    tokens = token_tile(count, experts) if tile in (None, dense.CUBLAS) else dense.parse_tile(tile)[0]
    # Sums of one expert's few rows are not worth splitting: other experts fill the machine.
    chosen = dense.plan(count, n, columns, accum, tokens, 1, driver.device_limits(y.device.index))
    numbers = (count, n, columns, experts, 0.0, DTYPES[out_dtype])
    token_tiles = most_tiles(count, experts, tokens)
    dense.launch(accum, chosen, token_tiles, padded, rows, bounds, w_scale, row_scale, y, None, numbers)
    return y


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
    """See `kbit.nvfp4.kernels.Kernels.moe_gemm_tiled`; what is refused has its tiles taken apart first.

    Under `tc`, too, sums are exact: that is faster than nvfp4_gemm.cu.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: K is larger than 2^20, or there are too many rows.
    """
    columns, experts = 2 * a_codes.shape[1], tiled.shape[0]
    if tiles_refusal(experts, columns, driver.device_limits(tiled.device.index).arch) is not None:
        w = nvfp4_layout.from_tiled(tiled, out_features, columns)
        return moe_gemm(a_codes, a_scales, rows, bounds, *w, w_scale, row_scale, accum, out_dtype)
    count = a_codes.shape[0] if rows is None else rows.shape[0]
    y = a_codes.new_empty((count, out_features), dtype=out_dtype)
    if y.numel() == 0 or columns == 0:
        return y.zero_()
    a_codes, a_scales = dense.padded_operands(a_codes, a_scales)
    multiply = exact.multiply_experts if count <= FEW_ROWS else exact_wgmma.multiply_experts
    multiply(a_codes, a_scales, rows, bounds, tiled, w_scale, row_scale, y)
    return y


def moe_linear_tiled(
    x: torch.Tensor, bounds: torch.Tensor, tiled: torch.Tensor, out_features: int, w_scale: torch.Tensor
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.moe_linear_tiled`: csrc/wgmma.cu; what is refused expert by expert.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    (count, columns), experts = x.shape, tiled.shape[0]
    y = x.new_empty((count, out_features))
    if y.numel() == 0 or columns == 0:
        return y.zero_()
    arch = driver.device_limits(x.device.index).arch
    if x.dtype in operands.DTYPES and tiles_refusal(experts, columns, arch) is None:
        tiles = ready(tiled).view(torch.int32)
        weight = tiles, constant(CODEBOOK, x.device), w_scale, bounds
        wgmma.grouped_linear(x, *weight, out_features, columns, False, y)
        return y
    y.zero_()
    for expert, rows in groups(bounds):
        y[rows] = linear_tiled(x[rows], tiled[expert], out_features, float(w_scale[expert]), None)
    return y


def tiles_refusal(experts: int, columns: int, arch: str) -> str | None:
    """Why tiles of so many experts may not be multiplied as they are, or None."""
    return exact_wgmma.refusal(columns, arch, experts)
