"""Rotary position embedding, and its angles, as one op each: schemas, checks, and the fake kernels.

    cos, sin = torch.ops.kbit.rotary_angles(frequencies, positions, factor, dtype)
    query, key = torch.ops.kbit.rotary(query, key, cos, sin, interleaved)

cos and sin [B, T, R] of positions int64 [B, T] times frequencies float32 [R / 2], a row's halves alike: in
float32, times the factor, rounded to the dtype, as transformers' modules of that name.

query [B, H, T, D] and key [B, H', T, D] by the angles of their positions, cos and sin [B or 1, T, R], as
transformers' `apply_rotary_pos_emb` (Su et al. 2021, arXiv:2104.09864): x * cos + rotate_half(x) * sin over
the first R columns, each product and the sum rounded to the dtype; other columns stay. `interleaved`, as
`apply_rotary_pos_emb_interleave`: of these columns all even ones are taken first and then the odd ones, and
the first R / 2 of cos and sin are the angles of both.
"""

from __future__ import annotations

import torch

from kbit.ops import checks
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "rotary(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved=False) -> (Tensor, Tensor)",
    tags=TAGS,
)
LIBRARY.define(
    "rotary_angles(Tensor frequencies, Tensor positions, float factor, ScalarType dtype) -> (Tensor, Tensor)",
    tags=TAGS,
)


def check(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Check the arguments of `kbit::rotary`.

    Raises:
        TypeError: query is not float, or another tensor of another dtype.
        ValueError: shapes or devices do not belong together.
    """
    checks.float_dtype("rotary", "query", query.dtype)
    others = {"key": key, "cos": cos, "sin": sin}
    for name, tensor in others.items():
        if tensor.dtype != query.dtype:
            raise TypeError(f"rotary: {name} must be {query.dtype} like query, got {tensor.dtype}. Cast one.")
        if tensor.device != query.device:
            raise ValueError(f"rotary: {name} is on {tensor.device}, query on {query.device}. Move one.")
    four = query.dim() == key.dim() == 4
    if not four or (len(key), *key.shape[2:]) != (len(query), *query.shape[2:]):
        raise ValueError(
            "rotary: query must be [B, H, T, D] and key [B, H', T, D], "
            f"got {tuple(query.shape)} and {tuple(key.shape)}."
        )
    batch, _, tokens, columns = query.shape
    fits = cos.dim() == 3 and cos.shape[0] in (1, batch) and cos.shape[1] == tokens
    if not fits or cos.shape != sin.shape or cos.shape[2] % 2 or not 0 < cos.shape[2] <= columns:
        raise ValueError(
            f"rotary: cos and sin must be [{batch} or 1, {tokens}, R] with an even R up to {columns}, "
            f"got {tuple(cos.shape)} and {tuple(sin.shape)}."
        )


def check_angles(frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> None:
    """Check the arguments of `kbit::rotary_angles`.

    Raises:
        TypeError: a dtype is not the one that is wanted.
        ValueError: shapes or devices do not belong together.
    """
    checks.float_dtype("rotary_angles", "dtype", dtype)
    operands = (("frequencies", frequencies, torch.float32, 1), ("positions", positions, torch.int64, 2))
    for name, tensor, wanted, dims in operands:
        if tensor.dtype != wanted:
            raise TypeError(f"rotary_angles: {name} must be {wanted}, got {tensor.dtype}. Cast it.")
        if tensor.dim() != dims:
            shape = "[R / 2]" if dims == 1 else "[B, T]"
            raise ValueError(f"rotary_angles: {name} must be {shape}, got {tuple(tensor.shape)}.")
    if frequencies.device != positions.device:
        raise ValueError(
            f"rotary_angles: frequencies are on {frequencies.device}, positions on {positions.device}. "
            "Move one of them."
        )


def output(x: torch.Tensor) -> torch.Tensor:
    """Like x [B, H, T, D], of any values, a token's heads next to each other in memory."""
    return x.new_empty(x.transpose(1, 2).shape).transpose(1, 2)


@torch.library.register_fake("kbit::rotary", lib=LIBRARY)
def rotary(query, key, cos, sin, interleaved=False):  # noqa: D103
    check(query, key, cos, sin)
    return output(query), output(key)


@torch.library.register_fake("kbit::rotary_angles", lib=LIBRARY)
def rotary_angles(frequencies, positions, factor, dtype):  # noqa: D103
    check_angles(frequencies, positions, dtype)
    shape = (*positions.shape, 2 * frequencies.shape[0])
    return frequencies.new_empty(shape, dtype=dtype), frequencies.new_empty(shape, dtype=dtype)
