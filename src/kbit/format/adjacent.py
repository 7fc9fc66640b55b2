"""Weights in tiles next to each other in memory, which then are one weight with the rows of all.

Products of one input are one product of it by such a weight, and an expert that follows a stack of them is
one more of the stack. All have as many columns, one width and one codebook, and all but the last whole tiles
of rows; whoever asks sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adjoin(tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tiles, int32 [..., row tiles, column tiles, words] each, in memory that they share."""
    rows = [one.detach().flatten(0, -3) for one in tiles]
    together = torch.cat(rows).split([one.shape[0] for one in rows])
    return [moved.view(one.shape) for moved, one in zip(together, tiles, strict=True)]


def as_one(tiles: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tiles that `adjoin` made, in the order that it had, as one without a copy; None of others.

    Returns:
        int32 [row tiles of all, column tiles, words].
    """
    first = tiles[0]
    memory, address, size = first.untyped_storage().data_ptr(), first.data_ptr(), first.shape[-2:]
    for one in tiles:
        here = one.untyped_storage().data_ptr() == memory and one.data_ptr() == address
        if not here or not one.is_contiguous() or one.shape[-2:] != size:
            return None
        address += one.nbytes
    row = size.numel()
    shape = (sum(one.numel() for one in tiles) // row, *size) if row else (0, *size)
    return first.detach().as_strided(shape, (row, size[-1], 1))
