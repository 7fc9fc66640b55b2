"""Tensor maps: how Hopper's copy engine finds boxes of a matrix."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kbit.backends.cuda import driver

_BYTES = 128
_BOX_COLUMNS = 64  # of 16 bits: the 128 bytes that are swizzled


def activation_map(x: torch.Tensor, box_rows: int) -> bytes:
    """The map of boxes [box_rows, 64] of a 16-bit matrix, in the 128-byte swizzle.

    Args:
        x: [..., K], rows of a matrix, float16 or bfloat16, contiguous, rows at multiples of 16 bytes.
        box_rows: at most 256.

    Returns:
        The driver's 128 opaque bytes. Elements outside of x read as zero.

    Raises:
        DriverError: the driver refused.
    """
    kind = "BFLOAT16" if x.dtype == torch.bfloat16 else "FLOAT16"
    columns, device = x.shape[-1], x.device.index
    rows = x.numel() // columns
    # Not a stride of x: that of a single row may be anything.
    return _encode(device, x.data_ptr(), rows, columns, 2 * columns, kind, box_rows, _BOX_COLUMNS, "128B")


def weight_map(tiled: torch.Tensor, box_rows: int) -> bytes:
    """The map of boxes of `box_rows` row tiles by one column tile.

    Args:
        tiled: int32 [row tiles, column tiles, words], contiguous, at a multiple of 16 bytes.
        box_rows: row tiles of a box.

    Returns:
        The driver's 128 opaque bytes. Tiles outside of the weight read as zero.

    Raises:
        DriverError: the driver refused.
    """
    rows, columns, words = tiled.shape
    sizes = (rows, columns * words, 4 * columns * words)
    return _encode(tiled.device.index, tiled.data_ptr(), *sizes, "UINT32", box_rows, words, "NONE")


@functools.lru_cache(maxsize=4096)
def _encode(
    device_index: int,
    address: int,
    rows: int,
    columns: int,
    stride: int,
    kind: str,
    box_rows: int,
    box_columns: int,
    swizzle: str,
) -> bytes:
    """Cached: a model's activations come back to the same addresses, and encoding takes microseconds."""
    cuda = driver.api()
    with driver.current(device_index):  # a thread that torch gave memory from its cache may have none yet
        result = cuda.cuTensorMapEncodeTiled(
            getattr(cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{kind}"),
            2,
            address,
            [cuda.cuuint64_t(columns), cuda.cuuint64_t(rows)],
            [cuda.cuuint64_t(stride)],
            [cuda.cuuint32_t(box_columns), cuda.cuuint32_t(box_rows)],
            [cuda.cuuint32_t(1), cuda.cuuint32_t(1)],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(cuda.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    encoded: Any = driver.check(result, "cuTensorMapEncodeTiled")
    return ctypes.string_at(encoded.getPtr(), _BYTES)
