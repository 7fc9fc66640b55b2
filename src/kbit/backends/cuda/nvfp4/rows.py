"""Kernels over rows: quantize, scatter, dequantize, repack, gather. Bits: `kbit.nvfp4.kernels`."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4.launch import SUB_BLOCK, THREADS, empty_coded, groups_of, run_items
from kbit.backends.cuda.weights import aligned
from kbit.backends.dtype_codes import DTYPES

_SUB_BLOCKS = {"ggml": 4, "mmq": 16}  # of an interleaved block
_PADDING = {"ggml": 4, "mmq": 32}  # sub-blocks that a row is padded to
# Sub-blocks up to which nvfp4_quantize_few.cu is faster: than nvfp4_quantize.cu, and nvfp4_quantize_rows.cu.
# Then the lanes that share one there.
_FEW, _FEW_WITH_FACTORS = 1024, 32768
_FEW_LANES = SUB_BLOCK // 2
_FEW_THREADS = (128, 256, 512)  # of a block
_FEW_COLUMNS = 32  # of a thread, at most, in which it looks for the row's largest
# Ways to deal rows without factors to threads, for measurements: nvfp4_quantize_few.cu's, and blocks of
# nvfp4_quantize.cu, whose size says on how many multiprocessors few rows are.
FEW_CUT = f"{_FEW_LANES} lanes"
CUT_THREADS = {f"{threads} threads": threads for threads in (32, 64, 128, 256)}
CUTS = (FEW_CUT, *CUT_THREADS)


@functools.cache
def quantize_spec(dtype: torch.dtype, ties_even: bool, search: bool) -> KernelSpec:
    """The kernel that quantizes rows of a dtype."""
    config = {"dtype": DTYPES[dtype], "ties_even": ties_even, "search": search}
    return KernelSpec.make("nvfp4_quantize.cu", **config)


@functools.cache
def quantize_few_spec(dtype: torch.dtype, ties_even: bool) -> KernelSpec:
    """The kernel that quantizes few rows of a dtype."""
    config = {"dtype": DTYPES[dtype], "ties_even": ties_even, "threads": _FEW_THREADS[-1]}
    return KernelSpec.make("nvfp4_quantize_few.cu", **config)


@functools.cache
def quantize_rows_spec(dtype: torch.dtype, ties_even: bool, search: bool) -> KernelSpec:
    """The kernel that quantizes rows of a dtype with factors of their own."""
    config = {"dtype": DTYPES[dtype], "ties_even": ties_even, "search": search}
    return KernelSpec.make("nvfp4_quantize_rows.cu", **config)


@functools.cache
def dequantize_spec(dtype: torch.dtype) -> KernelSpec:
    """The kernel that decodes to a dtype."""
    return KernelSpec.make("nvfp4_dequantize.cu", dtype=DTYPES[dtype])


@functools.cache
def repack_spec(layout: str) -> KernelSpec:
    """The kernel that interleaves codes and scales."""
    return KernelSpec.make("nvfp4_repack.cu", mmq=layout == "mmq")


GATHER = KernelSpec("nvfp4_gather.cu")


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    kinds = [(dtype, ties_even) for dtype in DTYPES for ties_even in (False, True)]
    many = (quantize_spec, quantize_rows_spec)
    return [
        *(spec(*kind, search) for spec in many for kind in kinds for search in (False, True)),
        *(quantize_few_spec(*kind) for kind in kinds),
        *(dequantize_spec(dtype) for dtype in DTYPES),
        *(repack_spec(layout) for layout in _SUB_BLOCKS),
        GATHER,
    ]


def quantizer(
    rows: int, columns: int, dtype: torch.dtype, search: bool, ties_even: bool, row_scale: bool
) -> KernelSpec:
    """The kernel that quantizes so many rows, with factors of their own if `row_scale`."""
    few, many = quantizers(dtype, search, ties_even, row_scale)
    return few if _are_few(rows, columns, row_scale) else many


def quantizers(
    dtype: torch.dtype, search: bool, ties_even: bool, row_scale: bool
) -> tuple[KernelSpec, KernelSpec]:
    """The kernels that quantize few and many rows, with factors of their own if `row_scale`."""
    many = quantize_rows_spec if row_scale else quantize_spec
    return quantize_few_spec(dtype, ties_even), many(dtype, ties_even, search)


def quantize(
    x: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.quantize`.

    Raises:
        ValueError: x has 2^31 blocks of 16 or more.
    """
    if _are_few(x.shape[0], x.shape[1], row_scale=False):
        return _quantize_few(x, search, ties_even, global_scale, None)
    return _quantize(x, None, search, ties_even, global_scale)


def quantize_cut(
    x: torch.Tensor, cut: str, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize` in one of CUTS, with the same bytes.

    Raises:
        ValueError: x has 2^31 blocks of 16 or more.
    """
    if cut == FEW_CUT:
        return _quantize_few(x, search, ties_even, global_scale, None)
    return _quantize(x, None, search, ties_even, global_scale, CUT_THREADS[cut])


def quantize_rows(
    x: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.quantize_rows`.

    Raises:
        ValueError: x has 2^31 rows or more.
    """
    rows, columns = x.shape
    row_scale = x.new_empty(rows, dtype=torch.float32)
    if _are_few(rows, columns, row_scale=True):
        return *_quantize_few(x, search, ties_even, global_scale, row_scale), row_scale
    codes, scales = empty_coded(x, rows, columns)
    groups = scales.shape[1]
    pointers = operands.addresses(x, row_scale, codes, scales)
    args = (*pointers, rows, columns, groups, global_scale, int(_is_wide(x)))
    # Threads that all have as much to do, in as few passes over a row as THREADS need.
    threads = -(-groups // (-(-groups // THREADS) * driver.WARP)) * driver.WARP
    spec = quantize_rows_spec(x.dtype, ties_even, search)
    run_items(spec, "QQQQiiifi", x.device, rows, args, 1, threads)
    return codes, scales, row_scale


def quantize_scatter(
    x: torch.Tensor, slots: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.quantize_scatter`.

    Raises:
        ValueError: x has 2^31 blocks of 16 or more.
    """
    return _quantize(x, slots, search, ties_even, global_scale)


def _quantize_few(
    x: torch.Tensor, search: bool, ties_even: bool, global_scale: float, row_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize`, or with row_scale, which it writes, `quantize_rows`, in one launch of few rows."""
    rows, columns = x.shape
    codes, scales = empty_coded(x, rows, columns)
    if rows == 0:
        return codes, scales
    groups = scales.shape[1]
    wide = (columns * x.element_size() | x.data_ptr()) % 16 == 0
    pointers = operands.addresses(x, row_scale, codes, scales)
    numbers = (columns, groups, global_scale, int(search), int(wide))
    kernel = launcher.load(quantize_few_spec(x.dtype, ties_even), x.device.index, "QQQQiifii")
    least = 0 if row_scale is None else groups * SUB_BLOCK // _FEW_COLUMNS
    parts, threads = _few_parts(rows, groups, least, driver.device_limits(x.device.index).multiprocessors)
    launcher.launch_on(x.device.index, kernel, (parts, rows, 1), threads, (*pointers, *numbers), pdl=True)
    return codes, scales


def _are_few(rows: int, columns: int, row_scale: bool) -> bool:
    return rows * groups_of(columns) <= (_FEW_WITH_FACTORS if row_scale else _FEW)


def _few_parts(rows: int, groups: int, least: int, multiprocessors: int) -> tuple[int, int]:
    """Blocks of a row, and their threads, at least so many: the smallest of which all run at once."""
    for threads in _FEW_THREADS:
        parts = -(-groups * _FEW_LANES // threads)
        if threads >= least and rows * parts <= multiprocessors:
            break
    return parts, threads


def _quantize(
    x: torch.Tensor,
    slots: torch.Tensor | None,
    search: bool,
    ties_even: bool,
    global_scale: float,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = x.shape
    out_rows, copies = (rows, 1) if slots is None else (slots.numel(), slots.shape[1])
    codes, scales = empty_coded(x, out_rows, columns)
    groups = scales.shape[1]
    pointers = operands.addresses(x, slots, codes, scales)
    args = (*pointers, rows, columns, groups, copies, global_scale, int(_is_wide(x)))
    spec = quantize_spec(x.dtype, ties_even, search)
    run_items(spec, "QQQQiiiifi", x.device, rows * groups, args, threads=threads)
    return codes, scales


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    global_scale: float,
    row_scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.dequantize`; also experts [E, N, ...] without row_scale.

    Raises:
        ValueError: there are 2^31 blocks of 16 or more.
    """
    codes = aligned(codes, 8)
    out = codes.new_empty((*scales.shape[:-1], scales.shape[-1] * SUB_BLOCK), dtype=dtype)
    pointers = operands.addresses(codes, scales, row_scale, out)
    sizes = (scales.numel(), scales.shape[-1], global_scale)
    run_items(dequantize_spec(dtype), "QQQQiif", codes.device, scales.numel(), (*pointers, *sizes))
    return out


def repack(codes: torch.Tensor, scales: torch.Tensor, layout: str) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.repack`.

    Raises:
        ValueError: there are 2^31 blocks of 16 or more.
    """
    *lead, rows, groups = scales.shape
    sub_blocks, padding = _SUB_BLOCKS[layout], _PADDING[layout]
    blocks = -(-groups // padding) * padding // sub_blocks
    nbytes = 9 * sub_blocks
    shape = (*lead, blocks, rows, nbytes) if layout == "mmq" else (*lead, rows, blocks * nbytes)
    codes, out = aligned(codes, 8), codes.new_empty(shape)
    total = out.numel() // 9
    args = (*operands.addresses(codes, scales, out), total, rows, groups, blocks)
    run_items(repack_spec(layout), "QQQiiii", codes.device, total, args)
    return out


def gather_rows(
    codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.gather_rows`.

    Raises:
        ValueError: there are 2^31 words of 8 bytes or more.
    """
    count, code_bytes, scale_bytes = rows.shape[0], codes.shape[1], scales.shape[1]
    codes_out = codes.new_empty((count, code_bytes))
    scales_out = scales.new_empty((count, scale_bytes))
    shifts = _word_shift(codes), _word_shift(scales)
    items = max(count * code_bytes >> shifts[0], count * scale_bytes >> shifts[1])
    pointers = operands.addresses(codes, scales, rows, codes_out, scales_out)
    sizes = (count, code_bytes, scale_bytes, *shifts)
    run_items(GATHER, "QQQQQiiiii", codes.device, items, (*pointers, *sizes))
    return codes_out, scales_out


def _is_wide(x: torch.Tensor) -> bool:
    """Whether rows are whole sub-blocks that start at multiples of 16 bytes."""
    return x.shape[1] % SUB_BLOCK == 0 and x.data_ptr() % 16 == 0


def _word_shift(matrix: torch.Tensor) -> int:
    """log2 of the widest word, up to 16 bytes, that divides a matrix's rows and address."""
    return next(s for s in (4, 3, 2, 1, 0) if (matrix.shape[1] | matrix.data_ptr()) % (1 << s) == 0)
