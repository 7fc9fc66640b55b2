"""NVFP4 products in PyTorch on the CPU; `kbit.nvfp4.kernels` states what they compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.backends.reference.products import groups
from kbit.format.autocast import without_autocast
from kbit.nvfp4.exact import integer_to_float32
from kbit.nvfp4.formats import layouts
from kbit.nvfp4.reference.quantize import decode, dequantize, row_chunks

# code * scale is a multiple of 2^-10 of magnitude at most 2688, so a product of two is a multiple of 2^-20.
# In these units it is at most 2752512^2 < 2^42.8: a float64 holds the sum of 1024 exactly in any order
# (7.758e15 < 2^53 = 9.007e15), an int64 that of 1217416.
_UNIT = 2.0**10
# With `seq16` this many times as many rows of W at a time: it has a product for each 16 columns of them.
_SUB_BLOCK_CHUNK = 16
_LINEAR_CHUNK = 4
CHUNKS = {"k1024": 1024, "k256": 256, "k48": 48}


def tiles(accum: str) -> tuple[str, ...]:
    """See `Kernels.tiles`: columns summed in float64 before they join the integer sum."""
    return tuple(CHUNKS) if accum == "exact" else ()


def gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    w_scale: float,
    row_scale: torch.Tensor | None,
    accum: str,
    out_dtype: torch.dtype,
    tile: str | None = None,
) -> torch.Tensor:
    """See `Kernels.gemm`."""
    a = decode(a_codes, a_scales)
    exact = accum == "exact"
    if exact:
        a = a.double().mul_(_UNIT)
    total = torch.empty(len(a), len(w_codes), dtype=torch.float32, device="cpu")
    # A product does not depend on its neighbours, so few rows of W are decoded at a time.
    for part in row_chunks(len(w_codes), a.shape[1], 1 if exact else _SUB_BLOCK_CHUNK):
        w = decode(w_codes[part], w_scales[part])
        total[:, part] = _exact(a, w, CHUNKS[tile or "k1024"]) if exact else _by_sub_blocks(a, w)
    scaled = total.mul_(torch.tensor(w_scale, dtype=torch.float32, device="cpu"))
    return (scaled if row_scale is None else scaled * row_scale[:, None]).to(out_dtype)


def _exact(units: torch.Tensor, w: torch.Tensor, chunk: int) -> torch.Tensor:
    """The correctly rounded float32 of the exact products [M, N] of float64 [M, K], in units, and [N, K]."""
    right = w.double().mul_(_UNIT).t()
    total = torch.zeros(units.shape[0], w.shape[0], dtype=torch.int64, device="cpu")
    for start in range(0, units.shape[1], chunk):
        part = slice(start, start + chunk)
        total += (units[:, part] @ right[part]).long()
    return integer_to_float32(total) / _UNIT**2


def _by_sub_blocks(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """float32 sum of exact 16-element products, ascending.

    Within 16 columns every product is a multiple of the two scales' last bits and their sum has at most 20
    significant bits, so a float32 product of any order is exact; so is one of bfloat16 operands, which torch
    may use under a lowered matmul precision. Autocast would also round the products themselves.
    """
    total = torch.zeros(a.shape[0], w.shape[0], dtype=torch.float32, device="cpu")
    with without_autocast(a.device):
        for start in range(0, a.shape[1], layouts.SUB_BLOCK):
            part = slice(start, start + layouts.SUB_BLOCK)
            total = total + a[:, part] @ w[:, part].t()
    return total


def linear(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, w_scale: float, bias: torch.Tensor | None
) -> torch.Tensor:
    """x [..., K] of dtype T times the transpose of W in layout nv, decoded to T -> [..., N].

    A few rows of W at a time: a third to half of the time went into writing all of it. The last bits of a
    float32 product may depend on how many rows that are.
    """
    with without_autocast(x.device):
        parts = [
            F.linear(
                x,
                dequantize(codes[part], scales[part], w_scale, None, x.dtype)[:, : x.shape[-1]],
                None if bias is None else bias[part],
            )
            for part in row_chunks(len(codes), 2 * codes.shape[1], _LINEAR_CHUNK)
        ]
    return torch.cat(parts, dim=-1) if parts else x.new_empty(*x.shape[:-1], 0)


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
    """See `Kernels.moe_gemm`."""
    if rows is not None:
        a_codes, a_scales = a_codes[rows], a_scales[rows]
        row_scale = None if row_scale is None else row_scale[rows]
    y = torch.zeros(len(a_codes), w_codes.shape[1], dtype=out_dtype, device="cpu")
    for expert, part in groups(bounds):
        y[part] = gemm(
            a_codes[part],
            a_scales[part],
            w_codes[expert],
            w_scales[expert],
            float(w_scale[expert]),
            None if row_scale is None else row_scale[part],
            accum,
            out_dtype,
            tile,
        )
    return y
