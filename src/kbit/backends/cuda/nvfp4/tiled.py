"""Products with NVFP4 weights in tiles.

Under `exact`: `kbit.backends.cuda.nvfp4.exact`. Under `tc`, and of activations that are not quantized:
csrc/stream.cu for few tokens, csrc/wgmma.cu for many. They are those of k-bit weights, compiled for NVFP4's
tiles (kUe4m3 of decode.cuh), and take 16-bit activations. Those in NVFP4 are decoded to the output's dtype,
which is exact, and their factors applied to the sums; where K is a multiple of 256 stream.cu decodes up to 8
tokens itself.
"""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, operands, preference, stream, stream_config, wgmma
from kbit.backends.cuda.nvfp4 import exact, products
from kbit.backends.cuda.nvfp4.constants import CODEBOOK, constant
from kbit.backends.cuda.nvfp4.rows import dequantize
from kbit.backends.cuda.weights import aligned, ready
from kbit.backends.reference.products import matmul
from kbit.format import nvfp4_layout


def refusal(m: int, dtype: torch.dtype, arch: str) -> str | None:
    """Why tiles may not be multiplied as they are, or None.

    Args:
        m: tokens.
        dtype: of the result.
        arch: of the device, such as "90a".
    """
    if dtype not in operands.DTYPES:
        return f"the kernels give float16 and bfloat16, not {dtype}"
    if m <= preference.STREAM_TOKENS:
        return None
    return wgmma.arch_refusal(arch)


def kernel(m: int, arch: str) -> str:
    """Which kernel multiplies what is not refused: "stream" or "wgmma"."""
    return "wgmma" if m > preference.FEW_TOKENS and wgmma.arch_refusal(arch) is None else "stream"


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
    """See `kbit.nvfp4.kernels.Kernels.gemm_tiled`; what is refused has its tiles taken apart first.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
        ValueError: K is larger than 2^20, or there are too many rows.
    """
    if accum == "exact":
        return exact.multiply(a_codes, a_scales, tiled, out_features, w_scale, row_scale, out_dtype)
    if refusal(a_codes.shape[0], out_dtype, _arch(tiled)) is not None:
        w = nvfp4_layout.from_tiled(tiled, out_features, 2 * a_codes.shape[1])
        return products.gemm(a_codes, a_scales, *w, w_scale, row_scale, "tc", out_dtype)
    m, columns = a_codes.shape[0], 2 * a_codes.shape[1]
    if 0 < m <= stream_config.CODED_TOKENS and out_features and columns % stream.GROUP_COLUMNS == 0:
        y = a_codes.new_empty((m, out_features), dtype=out_dtype)
        weight = (*_weight(tiled, w_scale), None, out_features, columns, False)
        stream.linear(aligned(a_codes), *weight, y, row_scale, aligned(a_scales))
        return y
    x = dequantize(a_codes, a_scales, 1.0, None, out_dtype)
    return _multiply(x, tiled, out_features, w_scale, row_scale, None)


def linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, w_scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.linear`.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    return matmul(x, dequantize(codes, scales, w_scale, None, x.dtype)[:, : x.shape[-1]], bias)


def linear_tiled(
    x: torch.Tensor, tiled: torch.Tensor, out_features: int, w_scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.linear_tiled`; what is refused has its weight decoded first.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    if refusal(x.shape[0], x.dtype, _arch(tiled)) is not None:
        return linear(x, *nvfp4_layout.from_tiled(tiled, out_features, x.shape[1]), w_scale, bias)
    return _multiply(x, tiled, out_features, w_scale, None, bias)


def _arch(tensor: torch.Tensor) -> str:
    return driver.device_limits(tensor.device.index).arch


def _weight(tiled: torch.Tensor, w_scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tiles, levels and factor, as kernels take them."""
    tiles = ready(tiled).view(torch.int32)
    return tiles, constant(CODEBOOK, tiled.device), constant((w_scale,), tiled.device)


def _multiply(
    x: torch.Tensor,
    tiled: torch.Tensor,
    out_features: int,
    w_scale: float,
    row_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y [M, N] = ((x @ W^T) * w_scale) * row_scale + bias, x [M, K] of a dtype and so many rows as may be."""
    m, columns = x.shape
    y = x.new_empty((m, out_features))
    if y.numel() == 0:
        return y
    weight = (*_weight(tiled, w_scale), bias)
    if kernel(m, _arch(x)) == "wgmma":
        wgmma.linear(x, *weight, out_features, columns, False, y, row_scale=row_scale)
        return y
    stream.linear(x, *weight, out_features, columns, False, y, row_scale)
    return y
