"""Kernels over whole rows of a weight: quantize, dequantize, embedding, and between the two layouts.

Tensors are contiguous, on one CUDA device, and checked by the op layer. Work goes to the current stream of
that device. Only `quantize` waits for it, once, for the count of NaN and Inf; `quantize_unchecked` leaves
that to the caller.
"""

from __future__ import annotations

import functools
import itertools

import torch

from kbit.backends.cuda import operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.row_launch import block_grid, joined, launch, staying_grid, tile_grid
from kbit.backends.cuda.weights import aligned, fenced
from kbit.backends.dtype_codes import ABSMAX_DTYPES, DTYPES
from kbit.format import layout
from kbit.format.codebook import BLOCK_SIZE, SUPPORTED_BITS, bits_of
from kbit.format.errors import NonFiniteWeightError
from kbit.format.symmetry import is_symmetric
from kbit.quantizers.scale_search import WINDOWS

# Blocks of threads to launch, per multiprocessor. Quantize: as many as run at once (registers allow 6 without
# the search), for a block that stays builds its tables once; so does tiled dequantize, whose blocks have 16
# warps. The others: a few times that, which evens out the end.
_QUANTIZE_PER_SM = {False: 6, True: 8}
_RARE_PER_SM = 2  # of the second pass, which only weights beyond E4M4's range need
_DEQUANTIZE_PER_SM = 64
_DECODE_PER_SM, _DECODE_WARPS = 2, 16  # of dequantize_tiled.cu
_STATS_BYTES = 16  # that a block of quantize.cu writes about a matrix


@functools.cache
def quantize_spec(bits: int, dtype: torch.dtype, search_window: tuple[int, int] | None) -> KernelSpec:
    """The kernel that quantizes; `search_window` as in `quantize`."""
    low, high = search_window or (0, 0)
    search = search_window is not None
    return KernelSpec.make("quantize.cu", bits=bits, dtype=DTYPES[dtype], search=search, low=low, high=high)


@functools.cache
def dequantize_spec(bits: int, dtype: torch.dtype, tiled: bool = False, symmetric: bool = True) -> KernelSpec:
    """The kernel that decodes to `dtype`, from the canonical form or from the tiled layout.

    `symmetric`: for codebooks that are, around 0; to float32, any, and so is the canonical form's.
    """
    if not tiled:
        return KernelSpec.make("dequantize.cu", bits=bits, dtype=DTYPES[dtype])
    any_codebook = operands.codebook_config(bits, symmetric or dtype == torch.float32)
    return KernelSpec.make("dequantize_tiled.cu", bits=bits, dtype=DTYPES[dtype], **any_codebook)


@functools.cache
def repack_spec(bits: int, inverse: bool) -> KernelSpec:
    """The kernel that permutes to the tiled layout, or back."""
    return KernelSpec.make("repack.cu", bits=bits, inverse=inverse)


def specs() -> list[KernelSpec]:
    """Every kernel of this module, with the default search windows."""
    found = []
    for bits in SUPPORTED_BITS:
        for dtype in DTYPES:
            found += [quantize_spec(bits, dtype, window) for window in (None, WINDOWS[bits])]
            found += [dequantize_spec(bits, dtype, tiled) for tiled in (False, True)]
        found += [repack_spec(bits, inverse) for inverse in (False, True)]
    others = [bits for bits, symmetric in operands.CODES if not symmetric]
    for bits, dtype in itertools.product(others, operands.DTYPES):
        found.append(dequantize_spec(bits, dtype, tiled=True, symmetric=False))
    return found


def quantize(
    w: torch.Tensor,
    codebook: torch.Tensor,
    midpoints: torch.Tensor,
    bits: int,
    search_window: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize to E4M4 scales, bit for bit as the reference does.

    Args:
        w: [N, K] or [E, N, K], float32, float16 or bfloat16.
        codebook: float32 [2^bits].
        midpoints: float32 [2^bits - 1], ascending.
        bits: 2 to 5.
        search_window: first and last offset of the scale search in E4M4 codes; None takes the rounded absmax.

    Returns:
        packed int32 [..., N, blocks * bits], absmax uint8 [..., N, blocks], scale float32 [...].

    Raises:
        NonFiniteWeightError: w holds NaN or Inf.
        ValueError: a matrix has 2^31 blocks or more.
    """
    packed, absmax, scale, nonfinite = quantize_unchecked(w, codebook, midpoints, bits, search_window)
    if bad := int(nonfinite):
        raise NonFiniteWeightError(bad)
    return packed, absmax, scale


def quantize_unchecked(
    w: torch.Tensor,
    codebook: torch.Tensor,
    midpoints: torch.Tensor,
    bits: int,
    search_window: tuple[int, int] | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize` without waiting: it can be captured in a CUDA graph.

    Args: as `quantize`.

    Returns:
        packed, absmax, scale, and how many NaN and Inf w holds, int64 [] on its device. The others mean
        nothing unless that is 0.

    Raises:
        ValueError: a matrix has 2^31 blocks or more.
    """
    w = w.contiguous()
    *leading, n, k = w.shape
    blocks = -(-k // BLOCK_SIZE)
    packed = w.new_empty((*leading, n, blocks * bits), dtype=torch.int32)
    absmax = w.new_empty((*leading, n, blocks), dtype=torch.uint8)
    if w.numel() == 0:
        scale = w.new_ones(leading, dtype=torch.float32)
        return packed, absmax, scale, w.new_zeros((), dtype=torch.int64)
    scale = w.new_empty(leading, dtype=torch.float32)
    nonfinite = w.new_empty((), dtype=torch.int64)
    matrices = leading[0] if leading else 1
    spec = quantize_spec(bits, w.dtype, search_window)
    slots, y, _ = block_grid(w.device, matrices, n, blocks, _QUANTIZE_PER_SM[search_window is not None])
    stats = w.new_empty(matrices * slots * _STATS_BYTES, dtype=torch.uint8)
    tensors = (w, codebook.contiguous(), midpoints.contiguous(), packed, absmax, scale, nonfinite, stats)
    pointers = operands.addresses(*tensors)
    rare = min(slots, block_grid(w.device, matrices, n, blocks, _RARE_PER_SM)[0])
    for step, x in enumerate((slots, rare)):  # measure and quantize; again where a matrix needs a factor
        args = (*pointers, matrices, n, k, slots, step, joined(w, k))
        launch(spec, "QQQQQQQQQQQiii", w.device, (x, y, 1), 4, args, dependent=step == 1)
    return packed, absmax, scale, nonfinite


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
) -> None:
    """Decode the canonical form into out [..., N, K], rounded to its dtype.

    Args:
        packed: int32 [..., N, blocks * bits]; a slice of rows will do.
        absmax: [..., N, blocks], E4M4, float16 or float32.
        codebook: float32 [2^bits].
        scale: float32 [...].
        in_features: K.
        out: float32, float16 or bfloat16, contiguous.

    Raises:
        ValueError: a matrix has 2^31 blocks or more.
    """
    matrices = packed.shape[0] if packed.dim() == 3 else 1
    _decode(packed, absmax, codebook, scale, None, matrices, in_features, out)


def embedding(
    ids: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
) -> None:
    """Decode rows ids int64 [T] of [N, K] into out [T, K].

    An id outside 0..N-1 stops the device with a trap, as torch's embedding does: nothing is read, and the
    next synchronizing call raises.
    """
    rows = packed.shape[0]
    packed, absmax = packed.unsqueeze(1), absmax.unsqueeze(1)  # N matrices of one row
    _decode(packed, absmax, codebook, scale, ids.contiguous(), rows, in_features, out)


def _decode(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor | None,
    sources: int,
    in_features: int,
    out: torch.Tensor,
) -> None:
    """Launch dequantize.cu: matrix m of `out` is matrix m, or ids[m], of the `sources` matrices given."""
    if out.numel() == 0:
        return
    matrices = sources if ids is None else ids.numel()
    n, blocks = absmax.shape[-2:]
    spec = dequantize_spec(bits_of(codebook), out.dtype)
    packed, absmax = aligned(packed), absmax.contiguous()
    pointers = operands.addresses(packed, absmax, codebook, scale, ids, out)
    sizes = (matrices, sources, n, in_features, ABSMAX_DTYPES[absmax.dtype], joined(out, in_features))
    grid = block_grid(out.device, matrices, n, blocks, _DEQUANTIZE_PER_SM)
    launch(spec, "QQQQQQQQQQii", out.device, grid, 4, (*pointers, *sizes))


def dequantize_tiled(
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bits: int,
    row_begin: int,
    out: torch.Tensor,
) -> None:
    """Decode rows of the tiled layout, rounded to out's dtype.

    Args:
        tiled: int32 [..., row tiles, column tiles, words]; see `kbit.format.layout`.
        codebook: float32 [2^bits].
        scale: float32 [...].
        bits: code width.
        row_begin: first row to decode.
        out: [..., rows, K], contiguous; row_begin + rows is at most 16 * row tiles.

    Raises:
        ValueError: `out` has other columns than the tiles, or asks for rows beyond them.
    """
    rows, k = out.shape[-2:]
    column_tiles, limit = tiled.shape[-2], tiled.shape[-3] * layout.TILE_ROWS
    if row_begin < 0 or row_begin + rows > limit or layout.tile_shape(1, k, bits)[1:] != tiled.shape[-2:]:
        raise ValueError(
            f"dequantize: rows {row_begin} to {row_begin + rows} of {k} columns at {bits} bits are not in "
            f"tiles {tuple(tiled.shape)} of {limit} rows. Was out made for another layer?"
        )
    if out.numel() == 0:
        return
    matrices = tiled.shape[0] if tiled.dim() == 4 else 1
    spec = dequantize_spec(bits, out.dtype, tiled=True, symmetric=is_symmetric(codebook))
    used = -(-(row_begin + rows) // layout.TILE_ROWS) - row_begin // layout.TILE_ROWS
    wide = int(k * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0)
    tiled = aligned(tiled)  # by name: a clone must live until the launch
    pointers = operands.addresses(tiled, codebook, scale, out)
    sizes = (matrices, limit, k, row_begin, row_begin + rows, wide)
    table = operands.TABLE_BYTES if out.element_size() == 2 else 128 << bits
    smem = table + _DECODE_WARPS * layout.TILE_ROWS * layout.TILE_COLUMNS * out.element_size()
    grid = staying_grid(out.device, matrices * used * column_tiles, _DECODE_WARPS, _DECODE_PER_SM)
    launch(spec, "QQQQQQQQQi", out.device, grid, _DECODE_WARPS, (*pointers, *sizes), smem=smem)


def to_tiled(packed: torch.Tensor, absmax: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """`kbit.format.layout.to_tiled` on the device: int32 [..., row tiles, column tiles, words]."""
    shape = layout.tile_shape(absmax.shape[-2], in_features, bits)
    tiled = packed.new_empty((*packed.shape[:-2], *shape))
    _repack(aligned(packed), absmax.contiguous(), tiled, bits, in_features, inverse=False)
    return fenced(tiled)


def from_tiled(
    tiled: torch.Tensor, bits: int, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kbit.format.layout.from_tiled` on the device: packed and absmax."""
    blocks = -(-in_features // BLOCK_SIZE)
    leading = tiled.shape[:-3]
    packed = tiled.new_empty((*leading, out_features, blocks * bits))
    absmax = tiled.new_empty((*leading, out_features, blocks), dtype=torch.uint8)
    _repack(packed, absmax, aligned(tiled), bits, in_features, inverse=True)
    return packed, absmax


def _repack(
    packed: torch.Tensor, absmax: torch.Tensor, tiled: torch.Tensor, bits: int, k: int, inverse: bool
) -> None:
    if tiled.numel() == 0:
        return
    matrices = tiled.shape[0] if tiled.dim() == 4 else 1
    grid = tile_grid(tiled.device, matrices, tiled.shape[-3], tiled.shape[-2])
    args = (*operands.addresses(packed, absmax, tiled), matrices, absmax.shape[-2], k)
    launch(repack_spec(bits, inverse), "QQQQQQ", tiled.device, grid, 8, args)
