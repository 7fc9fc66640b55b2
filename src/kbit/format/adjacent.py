"""Weights in tiles next to each other in memory, which then are one weight with the rows of all.

Products of one input are one product of it by such a weight. All but the last have whole tiles of rows, and
all have as many columns, one width and one codebook; whoever asks sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adjoin(tiles: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tiles, int32 [row tiles, column tiles, words] each, in memory that they share."""
    whole = torch.cat([one.detach() for one in tiles])
    return list(whole.split([one.shape[0] for one in tiles]))


def as_one(tiles: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tiles that `adjoin` made, in the order that it had, as one tensor without a copy; None of others."""
    first = tiles[0]
    memory, address = first.untyped_storage().data_ptr(), first.data_ptr()
    for one in tiles:
        here = one.untyped_storage().data_ptr() == memory and one.data_ptr() == address
        if not here or not one.is_contiguous() or one.shape[1:] != first.shape[1:]:
            return None
        address += one.nbytes
    rows = sum(one.shape[0] for one in tiles)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())
