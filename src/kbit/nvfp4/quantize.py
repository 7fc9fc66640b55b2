"""Quantize, dequantize and repack: the functions that take and return `NVFP4Tensor`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Real

import torch

from kbit.format import type_checks
from kbit.format.words import at
from kbit.nvfp4.formats import NonFiniteError, NVFP4Tensor, check_nvfp4, e2m1, layouts, ue4m3
from kbit.nvfp4.kernels import kernels_for
from kbit.ops import checks

TIES = ("zero", "even")
# What code * scale reaches: a global scale of amax / LARGEST uses the whole range of the scales.
LARGEST = e2m1.MAX * ue4m3.MAX


def quantize_nvfp4(
    x: torch.Tensor,
    search: bool = True,
    ties: str = "zero",
    row_scale: bool = False,
    global_scale: float | None = None,
    layout: str = "nv",
    check: bool = False,
    where: str = "",
) -> NVFP4Tensor:
    """Quantize rows to NVFP4; `kbit.nvfp4.kernels.Kernels.quantize` states the arithmetic.

    Source of the method: ggml's quantize_mmq_nvfp4 (amax / 6 and its neighbours, least squared error), here
    with defined rounding, so that every device gives the same bytes. Gradients end here.

    Args:
        x: float16, bfloat16 or float32 [M, K], or [E, M, K] for a stack.
        search: try the four neighbouring scale bytes of each block; without it, amax / 6 rounded to nearest.
        ties: halfway magnitudes go toward "zero", or to the "even" code as hardware rounds.
        row_scale: divide each row by its amax / 2688 first, and keep that factor (matrices only).
        global_scale: divide everything by it first; 1 if None. See `global_scale_for`.
        layout: "nv", "ggml", "mmq" or "tiled".
        check: count NaN and Inf, which zero their block of 16, and raise. On a GPU this waits for the device.
        where: name of the tensor or layer, for messages.

    Returns:
        NVFP4Tensor of x's shape; K is padded with zeros to 16 (ggml, tiled: 64, mmq: 512).

    Raises:
        NonFiniteError: with check, x holds NaN or Inf after scaling.
        TypeError, ValueError: the arguments do not fit.

    >>> t = quantize_nvfp4(torch.randn(4, 64))
    >>> dequantize_nvfp4(t, torch.float32).shape
    torch.Size([4, 64])
    """
    factor = check_input(x, search, ties, global_scale, row_scale, where)
    type_checks.flag("quantize_nvfp4", "check", check, where)
    layouts.check_layout(layout, "quantize_nvfp4", where)
    rows = x.detach().contiguous().view(-1, x.shape[-1])
    kernels = kernels_for(x)
    how, row_factor = (search, ties == "even", factor), None
    if row_scale:
        codes, scales, row_factor = kernels.quantize_rows(rows, *how)
    else:
        codes, scales = kernels.quantize(rows, *how)
    if check:
        _count_non_finite(rows, factor, row_factor, where)
    lead = x.shape[:-1]
    scale = torch.full(lead[:-1], factor, dtype=torch.float32, device=x.device if x.dim() == 3 else "cpu")
    codes, scales = (part.view(*lead, part.shape[-1]) for part in (codes, scales))
    t = NVFP4Tensor(codes, scales, scale, tuple(x.shape), "nv", row_factor)
    return repack_nvfp4(t, layout)


def check_input(
    x: torch.Tensor,
    search: bool,
    ties: str,
    global_scale: float | None,
    row_scale: bool = False,
    where: str = "",
) -> float:
    """Check what `quantize_nvfp4` asks of its arguments; returns the factor.

    Raises:
        TypeError, ValueError: the arguments do not fit.
    """
    type_checks.tensor("quantize_nvfp4", "x", x, where)
    checks.float_dtype("quantize_nvfp4", "x", x.dtype, where)
    if x.dim() not in (2, 3) or x.shape[-1] < 1:
        remedy = "Flatten the leading dimensions" if x.dim() > 3 else "Is it a vector? Add a dimension"
        if x.dim() in (2, 3):
            remedy = "Leave it as it is: there is nothing to quantize"
        raise ValueError(
            f"quantize_nvfp4: x must be [M, K] or [E, M, K] with K >= 1, got {tuple(x.shape)}{at(where)}. "
            f"{remedy}."
        )
    type_checks.flag("quantize_nvfp4", "row_scale", row_scale, where)
    if row_scale and x.dim() == 3:
        raise ValueError(f"quantize_nvfp4: row_scale is for a matrix, got {tuple(x.shape)}{at(where)}.")
    return check_rounding(search, ties, global_scale, "quantize_nvfp4", where)


def check_rounding(search: bool, ties: str, global_scale: float | None, op: str, where: str = "") -> float:
    """Check what everything that quantizes takes: search, the name of the ties, and the factor.

    Returns:
        The factor as a Python float.

    Raises:
        TypeError: search is no bool, or the factor no number.
        ValueError: one of them does not fit.
    """
    type_checks.flag(op, "search", search, where)
    if ties not in TIES:
        raise ValueError(f'{op}: ties must be "zero" or "even", got {ties!r}{at(where)}.')
    if global_scale is not None and not isinstance(global_scale, Real):
        raise TypeError(
            f"{op}: global_scale must be a number or None, got {type(global_scale).__name__}{at(where)}. "
            f"Take float() of a tensor of one element."
        )
    if global_scale is not None and not is_normal(global_scale):
        raise ValueError(
            f"{op}: global_scale must be a positive normal float32, got {global_scale}{at(where)}. Use "
            f"global_scale_for of what is quantized, or None for 1."
        )
    return 1.0 if global_scale is None else float(global_scale)


def is_normal(scale: float) -> bool:
    """Whether a number is positive, finite and not subnormal in float32."""
    limits = torch.finfo(torch.float32)
    return limits.tiny <= scale <= limits.max


def global_scale_for(x: torch.Tensor) -> float:
    """amax / 2688 in float32, as ModelOpt chooses a weight's `weight_scale_2`; 1 where that is not normal.

    Args:
        x: float16, bfloat16 or float32, any shape.

    Returns:
        A Python float that float32 holds exactly. Waits for the device.

    Raises:
        TypeError: x is no dense tensor of these dtypes.
    """
    type_checks.tensor("global_scale_for", "x", x)
    checks.float_dtype("global_scale_for", "x", x.dtype)
    largest = float(x.abs().amax()) if x.numel() else 0.0
    scale = float(torch.tensor(largest, dtype=torch.float32, device="cpu") / LARGEST)
    return scale if is_normal(scale) else 1.0


def _count_non_finite(
    rows: torch.Tensor, global_scale: float, row_scale: torch.Tensor | None, where: str
) -> None:
    values = rows.float() / torch.full((), global_scale, dtype=torch.float32, device=rows.device)
    bad = ~torch.isfinite(values if row_scale is None else values / row_scale[:, None])
    count = int(bad.sum())
    if count:
        padded = torch.nn.functional.pad(bad, (0, -bad.shape[1] % layouts.SUB_BLOCK))
        blocks = int(padded.unflatten(1, (-1, layouts.SUB_BLOCK)).any(dim=-1).sum())
        raise NonFiniteError(count, blocks, where)


def repack_nvfp4(t: NVFP4Tensor, layout: str) -> NVFP4Tensor:
    """The same codes and scales in another layout; lossless both ways.

    Weights in layout "tiled" are what `linear_nvfp4`, and `gemm_nvfp4` under "exact" and "tc", multiply
    fastest on a GPU, and `moe_gemm_nvfp4` on a Hopper GPU. "seq16" converts them back to "nv" at every call.

    Args:
        t: any NVFP4 tensor, [N, K] or [E, N, K].
        layout: "nv", "ggml", "mmq" or "tiled" (where scale bytes of 0x7F, which mean 0, become 0).

    Returns:
        A tensor of t's shape, its codes and scales uint8 as before; `t` itself if it has that layout already.

    Raises:
        TypeError: t is no NVFP4Tensor.
        ValueError: there is no such layout.
    """
    check_nvfp4("repack_nvfp4", "t", t)
    layouts.check_layout(layout, "repack_nvfp4")
    if layout == t.layout:
        return t
    codes, scales = t.nv()
    if layout == "nv":
        return replace(t, codes=codes, scales=scales, layout=layout)
    moves = layouts.from_nv if layout == "tiled" else kernels_for(codes).repack
    return replace(t, codes=moves(codes, scales, layout), scales=None, layout=layout)


def dequantize_nvfp4(t: NVFP4Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Decode: (magnitude * scale * global_scale) * row_scale, rounded after each factor and to dtype.

    Args:
        t: any layout.
        dtype: float16, bfloat16 or float32.

    Returns:
        dtype, t.shape.

    Raises:
        TypeError: t is no NVFP4Tensor, or another dtype.
    """
    check_nvfp4("dequantize_nvfp4", "t", t)
    checks.float_dtype("dequantize_nvfp4", "dtype", dtype)
    if len(t.shape) == 3:
        values = torch.empty(t.shape, dtype=dtype, device=t.device)
        for index in range(t.shape[0]):
            values[index] = dequantize_nvfp4(t.expert(index), dtype)
        return values
    codes, scales = t.nv()
    values = kernels_for(codes).dequantize(codes, scales, float(t.global_scale), t.row_scale, dtype)
    return values[:, : t.shape[1]]
