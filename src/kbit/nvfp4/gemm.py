"""gemm_nvfp4: a product of two NVFP4 matrices under a named accumulation contract."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.backends.reference.products import in_whole_steps
from kbit.format import nvfp4_layout, type_checks
from kbit.format.autocast import without_autocast
from kbit.format.words import at
from kbit.nvfp4.formats import NVFP4Tensor, check_nvfp4
from kbit.nvfp4.kernels import Kernels, kernels_for
from kbit.nvfp4.quantize import dequantize_nvfp4
from kbit.ops import checks, grad_checks

ACCUMULATIONS = ("exact", "seq16", "tc")
# Those under which weights in layout "tiled" are multiplied as they are.
TILED_ACCUMULATIONS = ("exact", "tc")
# Part of the key under which reference hashes are stored: a change of any defined bit raises it.
CONTRACT_VERSION = 1


def gemm_nvfp4(
    a: NVFP4Tensor,
    w: NVFP4Tensor,
    accum: str = "exact",
    out_dtype: torch.dtype = torch.bfloat16,
    tile: str | None = None,
    where: str = "",
) -> torch.Tensor:
    """y[m, n] = sum over k of a[m, k] * w[n, k].

    The operands' codes times block scales have 6 significant bits, so products are exact. The contract says
    how they are summed: "exact" rounds the exact sum once and thus knows no order, "seq16" adds exact sums of
    16 in float32, ascending, and "tc" lets tensor cores chain their accumulators. Then the float32 result is
    multiplied by a.global_scale * w.global_scale (one float32 factor), by a.row_scale, and rounded to
    out_dtype.

    Args:
        a: [M, K], any layout; a row_scale is allowed.
        w: [N, K], any layout, without row_scale. "tiled" is the fastest under "exact" and "tc" on a GPU,
            and taken apart at every call under "seq16".
        accum: "exact", "seq16" or "tc".
        out_dtype: float16, bfloat16 or float32.
        tile: force a tile or split choice, one of `tiles_nvfp4`; for measurements and for the gate.
        where: name of the layer, for messages.

    Returns:
        out_dtype [M, N].

    Raises:
        TypeError, ValueError: the operands or names do not fit.

    >>> a, w = quantize_nvfp4(torch.randn(2, 64)), quantize_nvfp4(torch.randn(8, 64))
    >>> gemm_nvfp4(a, w, out_dtype=torch.float32).shape
    torch.Size([2, 8])
    """
    check_product(a, w, accum, out_dtype, "gemm_nvfp4", where)
    if len(w.shape) != 2:
        raise ValueError(f"gemm_nvfp4: w must be [N, K], got {w.shape}. Use moe_gemm_nvfp4 for experts.")
    scale = float(a.global_scale * w.global_scale)
    kernels = kernels_for(a.codes)
    check_tile(tile, accum, kernels, "gemm_nvfp4")
    if w.layout == "tiled" and accum in TILED_ACCUMULATIONS and tile is None:
        return kernels.gemm_tiled(*a.nv(), w.codes, w.shape[0], scale, a.row_scale, accum, out_dtype)
    return kernels.gemm(*a.nv(), *w.nv(), scale, a.row_scale, accum, out_dtype, tile)


def linear_nvfp4(
    x: torch.Tensor, w: NVFP4Tensor, bias: torch.Tensor | None = None, where: str = ""
) -> torch.Tensor:
    """x @ w^T + bias with a weight in NVFP4 and activations as they are (W4A16).

    A weight in layout "tiled" is multiplied as it is on a GPU, unless x or the bias needs a gradient. Others
    are decoded to x's dtype, which rounds once, and multiplied by torch; on a CPU, without a gradient, a few
    rows at a time, so that there is no copy of the whole.

    Args:
        x: float16, bfloat16 or float32 [..., K].
        w: [N, K], any layout, without row_scale.
        bias: [N] of x's dtype.
        where: name of the layer, for messages.

    Returns:
        x's dtype [..., N].

    Raises:
        TypeError, ValueError: the operands do not fit.

    >>> linear_nvfp4(torch.randn(2, 64), quantize_nvfp4(torch.randn(8, 64))).shape
    torch.Size([2, 8])
    """
    check_nvfp4("linear_nvfp4", "w", w, where)
    if len(w.shape) != 2 or w.row_scale is not None:
        raise ValueError(
            f"linear_nvfp4: w must be [N, K] without row_scale, got {w.shape}{at(where)}. Experts go "
            f"to moe_gemm_nvfp4, activations to gemm_nvfp4."
        )
    checks.activation("linear_nvfp4", x, w.shape[1], w.device, where)
    if bias is not None:
        type_checks.tensor("linear_nvfp4", "bias", bias, where)
    if bias is not None and (bias.dtype != x.dtype or tuple(bias.shape) != w.shape[:1]):
        fits = tuple(bias.shape) == w.shape[:1]
        remedy = "Cast it to x's dtype" if fits else "Is it that of another layer"
        raise ValueError(
            f"linear_nvfp4: bias must be {x.dtype} [{w.shape[0]}] for these x and w, got {bias.dtype} "
            f"{tuple(bias.shape)}{at(where)}. {remedy}{'.' if fits else '?'}"
        )
    kernels = kernels_for(x, w=w.codes, bias=bias)
    if grad_checks.wants_grad(x, bias) or grad_checks.in_transform():
        with without_autocast(x.device):
            x, decoded = in_whole_steps(x, dequantize_nvfp4(w, x.dtype))
            return F.linear(x, decoded, bias)
    if w.layout != "tiled":
        return kernels.linear(x, *w.nv(), float(w.global_scale), bias)
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    y = kernels.linear_tiled(rows, w.codes, w.shape[0], float(w.global_scale), bias)
    return y.view(*x.shape[:-1], w.shape[0])


def tiles_nvfp4(accum: str, device: torch.device | str = "cpu") -> tuple[str, ...]:
    """Names of the tile and split choices that a device's products can be forced to under a contract.

    Args:
        accum: name of the contract, "exact", "seq16" or "tc".
        device: where products would run.

    Raises:
        ValueError: there is no such contract, or no such device.
    """
    check_accumulation(accum, "tiles_nvfp4")
    try:
        there = torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # what PyTorch raises is a matter of how it was built
        raise ValueError(f"tiles_nvfp4: there is no device {str(device)!r}: {error}.") from None
    return kernels_for(there).tiles(accum)


def check_accumulation(accum: str, op: str) -> None:
    """Check the name of a contract.

    Raises:
        ValueError: there is no such contract.
    """
    if accum not in ACCUMULATIONS:
        raise ValueError(f"{op}: accum must be one of {', '.join(ACCUMULATIONS)}, got {accum!r}.")


def check_tile(tile: str | None, accum: str, kernels: Kernels, op: str) -> None:
    """Check the name of a forced tile: one of another contract may split sums that have an order.

    Raises:
        ValueError: products on this device have none of that name under the contract.
    """
    if tile is None or tile in (known := kernels.tiles(accum)):
        return
    raise ValueError(
        f"{op}: under {accum!r} a tile may be {', '.join((*known, 'None'))} here, got {tile!r}. "
        f"`tiles_nvfp4` lists them."
    )


def check_product(
    a: NVFP4Tensor, w: NVFP4Tensor, accum: str, out_dtype: torch.dtype, op: str, where: str = ""
) -> None:
    """Check what every product asks of its operands.

    Raises:
        TypeError, ValueError: the operands or names do not fit.
    """
    check_nvfp4(op, "a", a, where)
    check_nvfp4(op, "w", w, where)
    check_accumulation(accum, op)
    checks.float_dtype(op, "out_dtype", out_dtype, where)
    if len(a.shape) != 2 or a.shape[-1] != w.shape[-1]:
        raise ValueError(
            f"{op}: a must be [M, {w.shape[-1]}] for a weight {w.shape}, got {a.shape}{at(where)}. Check the "
            f"input projection."
        )
    nvfp4_layout.check_columns(op, w.shape[-1], where)
    if a.device != w.device:
        raise ValueError(f"{op}: a is on {a.device}, w on {w.device}{at(where)}. Move one of them.")
    if w.row_scale is not None:
        raise ValueError(
            f"{op}: w has a row_scale, which only activations may have{at(where)}. Use a global_scale."
        )
