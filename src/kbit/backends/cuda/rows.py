"""Kernels over whole rows of a weight: quantize, dequantize, embedding, and between the two layouts.

Tensors are contiguous, on one CUDA device, and checked by the op layer. Work goes to the current stream of
that device. Only `quantize` waits for it, once, for the count of NaN and Inf.
"""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import driver, launcher, layout
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format.codebook import BLOCK_SIZE, SUPPORTED_BITS
from kbit.format.errors import NonFiniteWeightError
from kbit.quantizers.scale_search import WINDOWS

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # Dense<DTYPE> of rows.cuh
_ABSMAX_FORMATS = {torch.uint8: 0, torch.float16: 1, torch.float32: 2}
_TILES = 32  # blocks a warp takes at a time in quantize and dequantize
_MAX_BLOCKS = 2**31 - 1  # of one matrix: their numbers are 32 bits in the kernels
_MAX_GRID = 65535  # in y and z
_WARP = 32
_Grid = tuple[int, int, int]

# Blocks of threads to launch, per multiprocessor. Quantize: as many as run at once (registers allow 5), for a
# block that stays builds its tables once. The others: a few times that, which evens out the end.
_QUANTIZE_PER_SM = {False: 5, True: 8}
_DEQUANTIZE_PER_SM = 64
_TILED_PER_SM = 8


@functools.cache
def quantize_spec(bits: int, dtype: torch.dtype, search_window: tuple[int, int] | None) -> KernelSpec:
    """The kernel that quantizes; `search_window` as in `quantize`."""
    low, high = search_window or (0, 0)
    search = search_window is not None
    return KernelSpec.make("quantize.cu", bits=bits, dtype=_DTYPES[dtype], search=search, low=low, high=high)


@functools.cache
def dequantize_spec(bits: int, dtype: torch.dtype, tiled: bool = False) -> KernelSpec:
    """The kernel that decodes to `dtype`, from the canonical form or from the tiled layout."""
    source = "dequantize_tiled.cu" if tiled else "dequantize.cu"
    return KernelSpec.make(source, bits=bits, dtype=_DTYPES[dtype])


@functools.cache
def repack_spec(bits: int, inverse: bool) -> KernelSpec:
    """The kernel that permutes to the tiled layout, or back."""
    return KernelSpec.make("repack.cu", bits=bits, inverse=inverse)


def row_specs() -> list[KernelSpec]:
    """Every kernel of this module, with the default search windows."""
    specs = []
    for bits in SUPPORTED_BITS:
        for dtype in _DTYPES:
            specs += [quantize_spec(bits, dtype, window) for window in (None, WINDOWS[bits])]
            specs += [dequantize_spec(bits, dtype, tiled) for tiled in (False, True)]
        specs += [repack_spec(bits, inverse) for inverse in (False, True)]
    return specs


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
    w = w.contiguous()
    *leading, n, k = w.shape
    blocks = -(-k // BLOCK_SIZE)
    packed = w.new_empty((*leading, n, blocks * bits), dtype=torch.int32)
    absmax = w.new_empty((*leading, n, blocks), dtype=torch.uint8)
    if w.numel() == 0:
        return packed, absmax, w.new_ones(leading, dtype=torch.float32)
    scale = w.new_empty(leading, dtype=torch.float32)
    matrices = leading[0] if leading else 1
    stats = w.new_zeros(2 + 2 * matrices, dtype=torch.int32)
    spec = quantize_spec(bits, w.dtype, search_window)
    grid = _block_grid(w.device, matrices, n, blocks, _QUANTIZE_PER_SM[search_window is not None])
    tensors = (w, codebook.contiguous(), midpoints.contiguous(), packed, absmax, scale, stats)
    pointers = tuple(t.data_ptr() for t in tensors)
    joined = _joined(w, k)
    for step in (0, 1):  # measure and quantize; again where a matrix needs a factor
        _launch(spec, "QQQQQQQQQQii", w.device, grid, 4, (*pointers, matrices, n, k, step, joined))
    if bad := int(stats[:2].view(torch.int64)):
        raise NonFiniteWeightError(bad)
    return packed, absmax, scale


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
    spec = dequantize_spec(codebook.numel().bit_length() - 1, out.dtype)
    packed, absmax = _aligned(packed), absmax.contiguous()
    pointers = tuple(t.data_ptr() for t in (packed, absmax, codebook, scale))
    pointers += (0 if ids is None else ids.data_ptr(), out.data_ptr())
    sizes = (matrices, sources, n, in_features, _ABSMAX_FORMATS[absmax.dtype], _joined(out, in_features))
    grid = _block_grid(out.device, matrices, n, blocks, _DEQUANTIZE_PER_SM)
    _launch(spec, "QQQQQQQQQQii", out.device, grid, 4, (*pointers, *sizes))


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
        tiled: int32 [..., row tiles, column tiles, words]; see `kbit.backends.cuda.layout`.
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
    spec = dequantize_spec(bits, out.dtype, tiled=True)
    used = -(-(row_begin + rows) // layout.TILE_ROWS) - row_begin // layout.TILE_ROWS
    grid = _tile_grid(out.device, matrices, used, column_tiles)
    wide = int(k * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0)
    pointers = tuple(t.data_ptr() for t in (_aligned(tiled), codebook, scale, out))
    sizes = (matrices, limit, k, row_begin, row_begin + rows, wide)
    _launch(spec, "QQQQQQQQQi", out.device, grid, 8, (*pointers, *sizes))


def to_tiled(packed: torch.Tensor, absmax: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """`kbit.backends.cuda.layout.to_tiled` on the device: int32 [..., row tiles, column tiles, words]."""
    layout.check_canonical(packed, absmax, bits, in_features)
    shape = layout.tile_shape(absmax.shape[-2], in_features, bits)
    tiled = packed.new_empty((*packed.shape[:-2], *shape))
    _repack(_aligned(packed), absmax.contiguous(), tiled, bits, in_features, inverse=False)
    # Kernels launched as dependents read weights before the kernel in front of them is done. This one is no
    # dependent: it waits for the permutation, and then stands in front.
    tiled.new_zeros(1, dtype=torch.uint8)
    return tiled


def from_tiled(
    tiled: torch.Tensor, bits: int, out_features: int, in_features: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kbit.backends.cuda.layout.from_tiled` on the device: packed and absmax."""
    layout.check_tiled(tiled, bits, out_features, in_features)
    blocks = -(-in_features // BLOCK_SIZE)
    leading = tiled.shape[:-3]
    packed = tiled.new_empty((*leading, out_features, blocks * bits))
    absmax = tiled.new_empty((*leading, out_features, blocks), dtype=torch.uint8)
    _repack(packed, absmax, _aligned(tiled), bits, in_features, inverse=True)
    return packed, absmax


def _repack(
    packed: torch.Tensor, absmax: torch.Tensor, tiled: torch.Tensor, bits: int, k: int, inverse: bool
) -> None:
    if tiled.numel() == 0:
        return
    matrices = tiled.shape[0] if tiled.dim() == 4 else 1
    grid = _tile_grid(tiled.device, matrices, tiled.shape[-3], tiled.shape[-2])
    args = (packed.data_ptr(), absmax.data_ptr(), tiled.data_ptr(), matrices, absmax.shape[-2], k)
    _launch(repack_spec(bits, inverse), "QQQQQQ", tiled.device, grid, 8, args)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous and at an address for 16-byte loads; views at odd offsets are copied."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _joined(dense: torch.Tensor, columns: int) -> int:
    """1 if blocks of 32 follow one another in `dense`, for copies of 16 bytes."""
    return int(columns % BLOCK_SIZE == 0 and dense.data_ptr() % 16 == 0)


def _block_grid(device: torch.device, matrices: int, n: int, blocks: int, per_sm: int) -> _Grid:
    """Four warps a block of threads, each a tile of 32 blocks at a time."""
    if n * blocks > _MAX_BLOCKS:
        raise ValueError(
            f"CUDA kernels: a matrix may have {_MAX_BLOCKS} blocks of 32 weights, got {n} rows of {blocks}. "
            f"Split its rows."
        )
    wanted = driver.device_limits(device.index).multiprocessors * per_sm
    y = min(matrices, wanted, _MAX_GRID)
    needed = -(-n * blocks // (_TILES * 4))
    return min(needed, -(-wanted // y)), y, 1


def _tile_grid(device: torch.device, matrices: int, row_tiles: int, column_tiles: int) -> _Grid:
    """Eight warps a block of threads, each a tile of 16 x 64 at a time."""
    z, y = min(matrices, _MAX_GRID), min(row_tiles, _MAX_GRID)
    wanted = -(-driver.device_limits(device.index).multiprocessors * _TILED_PER_SM // (z * y))
    return min(-(-column_tiles // 8), wanted), y, z


def _launch(
    spec: KernelSpec, format: str, device: torch.device, grid: _Grid, warps: int, args: tuple[int, ...]
) -> None:
    kernel = launcher.load(spec, device.index, format)
    launcher.launch_on(device.index, kernel, grid, warps * _WARP, args)
