"""What kernels ask of their operands alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.format import layout, nvfp4_layout
from kbit.format.codebook import SUPPORTED_BITS
from kbit.ops.checks import HALF_DTYPES

DTYPES = HALF_DTYPES
# Code widths, and whether the codebook is symmetric, that kernels are compiled for.
CODES = (*((bits, True) for bits in SUPPORTED_BITS), (5, False))
PIECE = 8  # elements of 16 bits in 16 bytes
MOST_EXPERTS = 1024  # of which a kernel can keep a list in shared memory
TABLE_BYTES = 65536  # of decode.cuh's look-up table
# Widths whose table is half unused: every other so many bytes; and how much that is in all.
HOLES, HOLE, HOLE_BYTES = (3, 4, 5), 128, TABLE_BYTES // 2
# Shared memory of a block: all that sm_86, 89 and 120 have; and the most that is too little for two tables.
SMALL_MEMORY, ONE_TABLE_MEMORY = 99 * 1024, 200 * 1024


def refusal(dtype: torch.dtype, out_features: int, silu_and_mul: bool) -> str | None:
    """Why no fused kernel may take a problem, or None."""
    if dtype not in DTYPES:
        return f"it takes float16 and bfloat16, got {dtype}"
    if silu_and_mul and out_features % (2 * layout.TILE_ROWS):
        return f"gates must end with a tile of {layout.TILE_ROWS} rows, got {out_features // 2} gates"
    return None


def tile_words(bits: int, nvfp4: bool) -> int:
    """int32 words of a tile; `nvfp4`: of NVFP4."""
    return nvfp4_layout.TILE_BYTES // 4 if nvfp4 else layout.tile_words(bits)


def nvfp4_config(nvfp4: bool) -> dict[str, bool]:
    """What a kernel's configuration names for NVFP4's tiles, and for others does not; see decode.cuh."""
    return {"ue4m3": True} if nvfp4 else {}


def codebook_config(bits: int, symmetric: bool) -> dict[str, bool]:
    """What a kernel's configuration names for a codebook that is not symmetric; see decode.cuh."""
    return {"any_codebook": True} if not symmetric and (bits, False) in CODES else {}


def padded(columns: int) -> int:
    """Elements of 16 bits from a row of activations to the next: so many that rows begin at 16 bytes."""
    return columns + -columns % PIECE


def addresses(*tensors: torch.Tensor | None) -> tuple[int, ...]:
    """Where tensors are, 0 for None."""
    return tuple([0 if tensor is None else tensor.data_ptr() for tensor in tensors])


def pieces(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Strides of all but the last dimension in pieces of 16 bytes; None where it is not made of these."""
    *strides, last = tensor.stride()
    size = tensor.element_size()
    whole = last == 1 and not tensor.data_ptr() % 16 and not any(step * size % 16 for step in strides)
    return tuple(step * size // 16 for step in strides) if whole else None


def all_pieces(*tensors: torch.Tensor | None) -> list[tuple[int, ...]] | None:
    """`pieces` of each tensor that is not None; None where one is not made of these."""
    found = []
    for tensor in tensors:
        if tensor is None:
            continue
        steps = pieces(tensor)
        if steps is None:
            return None
        found.append(steps)
    return found


def by_sequence(tensor: torch.Tensor, steps: tuple[int, ...]) -> tuple[int, ...]:
    """`steps` of a tensor [B or 1, ...], the first of them 0 where all sequences have the same."""
    return (0, *steps[1:]) if len(tensor) == 1 else steps


def aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x [M, K], contiguous and 16-bit, with rows at multiples of 16 bytes: K is padded with zeros."""
    if x.shape[1] % PIECE:
        return F.pad(x, (0, padded(x.shape[1]) - x.shape[1]))
    return x if x.data_ptr() % 16 == 0 else x.clone()


def grouped_refusal(dtype: torch.dtype, out_features: int, silu_and_mul: bool, experts: int) -> str | None:
    """Why no fused kernel may take a problem of several experts, or None."""
    if experts > MOST_EXPERTS:
        return f"it lists up to {MOST_EXPERTS} experts, got {experts}"
    return refusal(dtype, out_features, silu_and_mul)


def activate(both: torch.Tensor, out: torch.Tensor) -> None:
    """out [M, I] = silu(gate) * up of [M, 2I], gates first; for products that do not fuse it."""
    gate, up = both.chunk(2, dim=-1)
    torch.mul(F.silu(gate), up, out=out)
