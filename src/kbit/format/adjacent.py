"""Weights in tiles next to each other in memory, which then are one weight with the rows of all.

Products of one input are one product of it by such a weight, and an expert that follows a stack of them is
one more of the stack. All have as many columns, one width and one codebook, and all but the last whole tiles
of rows; whoever asks sees to that. Biases of such layers are neighbours likewise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Of tiles, what follows after their rows: column tiles, words.
_TILE_DIMS = 2


def _row_dims(one: torch.Tensor) -> int:
    """The first dimension of the shape of a row tile, or of an element of a bias."""
    return -_TILE_DIMS if one.dim() > _TILE_DIMS else 1


def adjoin(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of tiles, int32 [..., row tiles, column tiles, words] each, or biases [N], that share memory."""
    rows = [one.detach().reshape(-1, *one.shape[_row_dims(one) :]) for one in parts]
    together = torch.cat(rows).split([one.shape[0] for one in rows])
    return [moved.view(one.shape) for moved, one in zip(together, parts, strict=True)]


def as_one(parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """What `adjoin` made, in the order that it had, as one tensor without a copy; None of others.

    Returns:
        Tiles [row tiles of all, column tiles, words], or a bias [N of all].
    """
    first = parts[0]
    dims, dtype, end = _row_dims(first), first.dtype, first.data_ptr()
    row = first.shape[dims:]
    for one in parts:
        if one.data_ptr() != end or one.dtype != dtype or not one.is_contiguous() or one.shape[dims:] != row:
            return None
        end += one.nbytes
    memory = first.untyped_storage()
    if end > memory.data_ptr() + memory.nbytes():
        return None  # neighbours by chance
    size = row.numel()
    shape = (sum([one.numel() for one in parts]) // size if size else 0, *row)
    first = first.detach() if first.requires_grad else first
    return first.as_strided(shape, (size, row[-1], 1) if row else (1,))
