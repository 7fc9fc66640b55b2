"""Sizes of the tiled form, which GPU kernels read: a permutation of the canonical form, never saved.

A tile holds 16 rows by 64 columns of a matrix: 32 * bits int32 words of codes and 8 words of E4M4 scales.
Where which bits are is `kbit.backends.cuda.layout`; here is only what shapes and checks need.
"""

from __future__ import annotations

TILE_ROWS = 16
TILE_COLUMNS = 64
SCALE_WORDS = 8


def tile_words(bits: int) -> int:
    """int32 words of one tile."""
    return 32 * bits + SCALE_WORDS


def tile_shape(out_features: int, in_features: int, bits: int) -> tuple[int, int, int]:
    """Shape of the tiled form of a weight [out_features, in_features].

    Returns:
        (row tiles, column tiles, words of a tile); both sizes are padded to whole tiles.
    """
    return -(-out_features // TILE_ROWS), -(-in_features // TILE_COLUMNS), tile_words(bits)
