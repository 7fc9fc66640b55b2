"""NVFP4's tiles, in which CUDA kernels read its weights, and their reference permutation in pure PyTorch.

A tile is 16 rows by 64 columns in 576 bytes: codes as `kbit.format.layout` places them at 4 bits, and 16
words of ue4m3 scales: byte 4r + j of the g-th pair of words is the scale of row g + 8r in step j, a block of
16 columns. A byte of codes in the layout nv is a pair, so bytes are moved and none is taken apart.

Scales have no sign, so the top bits of a tile's first 16 bytes of scales are free. They are its mark, of
`kbit.format.nvfp4_marks`, the lowest bit first. Whoever reads scales leaves the top bits out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.format import nvfp4_marks
from kbit.format.layout import TILE_COLUMNS, TILE_ROWS
from kbit.format.words import at

BITS = 4
BLOCK = 16  # elements with a scale
MAX_COLUMNS = 2**20  # int64 holds the exact sum of so many products
TILE_BYTES = 576
_CODE_BYTES = 512
_SCALE = 0x7F  # of a byte, without its mark


def is_nvfp4(tiled: torch.Tensor) -> bool:
    """Whether int32 [..., words] are tiles of NVFP4, which are of a size of their own."""
    return tiled.shape[-1] * 4 == TILE_BYTES


def check_columns(op: str, columns: int, where: str = "") -> None:
    """Raise ValueError for more columns than `MAX_COLUMNS`, in a layer of a name, if that is known."""
    if columns > MAX_COLUMNS:
        raise ValueError(f"{op}: K must be at most {MAX_COLUMNS}, got {columns}{at(where)}. Split K.")


def to_tiled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Permute codes and scales of the layout nv into tiles.

    Args:
        codes: uint8 [..., N, K16 / 2], element 2j in the low nibble of byte j; K16 is a multiple of 16.
        scales: uint8 [..., N, K16 / 16], ue4m3. Bytes of 0x7F, which mean 0, become 0, and bit 7 is dropped.

    Returns:
        uint8 [..., ceil(N / 16), ceil(K16 / 64), 576].
    """
    *leading, n, groups = scales.shape
    row_tiles, column_tiles = -(-n // TILE_ROWS), -(-groups * BLOCK // TILE_COLUMNS)
    more_rows, more = row_tiles * TILE_ROWS - n, column_tiles * 4 - groups
    scales = scales & _SCALE
    scales = scales.masked_fill_(scales == _SCALE, 0)
    if more_rows or more:
        codes = F.pad(codes, (0, more * BLOCK // 2, 0, more_rows))
        scales = F.pad(scales, (0, more, 0, more_rows))
    tiles = codes.new_empty((*leading, row_tiles, column_tiles, TILE_BYTES))
    flat = tiles.view(-1, row_tiles, column_tiles, TILE_BYTES)
    # [E, row tile, r, g, column tile, j, c, t] -> [E, row tile, column tile, g, t, j, c, r]
    pairs = codes.reshape(-1, row_tiles, 2, 8, column_tiles, 4, 2, 4).permute(0, 1, 4, 3, 7, 5, 6, 2)
    flat[..., :_CODE_BYTES].view(-1, row_tiles, column_tiles, 8, 4, 4, 2, 2).copy_(pairs)
    bytes_of = scales.reshape(-1, row_tiles, 2, 8, column_tiles, 4).permute(0, 1, 4, 3, 2, 5)
    flat[..., _CODE_BYTES:].view(-1, row_tiles, column_tiles, 8, 2, 4).copy_(bytes_of)
    matrices = (part.reshape(len(flat), row_tiles * TILE_ROWS, -1) for part in (codes, scales))
    flat[..., _CODE_BYTES : _CODE_BYTES + nvfp4_marks.BITS] |= nvfp4_marks.of_matrices(*matrices) << 7
    return tiles


def from_tiled(tiled: torch.Tensor, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Undo `to_tiled`.

    Args:
        tiled: uint8 [..., row tiles, column tiles, 576].
        out_features: N.
        in_features: K; K16 is the next multiple of 16.

    Returns:
        codes uint8 [..., N, K16 / 2] and scales uint8 [..., N, K16 / 16].
    """
    *leading, row_tiles, column_tiles, _ = tiled.shape
    groups = -(-in_features // BLOCK)
    flat = tiled.reshape(-1, row_tiles, column_tiles, TILE_BYTES)
    pairs = flat[..., :_CODE_BYTES].unflatten(-1, (8, 4, 4, 2, 2)).permute(0, 1, 7, 3, 2, 5, 6, 4)
    codes = pairs.reshape(*leading, row_tiles * TILE_ROWS, column_tiles * TILE_COLUMNS // 2)
    bytes_of = flat[..., _CODE_BYTES:].unflatten(-1, (8, 2, 4)).permute(0, 1, 4, 3, 2, 5)
    scales = bytes_of.reshape(*leading, row_tiles * TILE_ROWS, column_tiles * 4)
    codes = codes[..., :out_features, : groups * BLOCK // 2]
    return codes.contiguous(), scales[..., :out_features, :groups] & _SCALE
