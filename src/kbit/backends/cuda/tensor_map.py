"""Tensor maps: how Hopper's copy engine finds boxes of a matrix."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from kbit.backends.cuda import driver

_BYTES = 128


def activation_map(x: torch.Tensor, box_rows: int) -> bytes:
    """The map of boxes [box_rows, 64] of a 16-bit matrix, in the 128-byte swizzle.

    Args:
        x: [M, K], float16 or bfloat16, K-contiguous, rows at multiples of 16 bytes.
        box_rows: at most 256.

    Returns:
        The driver's 128 opaque bytes. Elements outside of x read as zero.

    Raises:
        DriverError: the driver refused.
    """
    kind = "BFLOAT16" if x.dtype == torch.bfloat16 else "FLOAT16"
    return _encode(x.data_ptr(), x.shape[0], x.shape[1], 2 * x.stride(0), kind, box_rows, 64, "128B")


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
    stride = 4 * columns * words
    return _encode(tiled.data_ptr(), rows, columns * words, stride, "UINT32", box_rows, words, "NONE")


@functools.lru_cache(maxsize=4096)
def _encode(
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
    encoded: Any = driver.check(
        cuda.cuTensorMapEncodeTiled(
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
        ),
        "cuTensorMapEncodeTiled",
    )
    return ctypes.string_at(encoded.getPtr(), _BYTES)
