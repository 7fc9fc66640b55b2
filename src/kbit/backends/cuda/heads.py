"""New tokens' heads into a cache, csrc/append_heads.cu: which it takes, and its launch."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import driver, elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import heads as reference

_FORMAT = "Q" * 11 + "Q" * 11 + "i" * 7 + "fii"
_LANES = (driver.WARP // 2, driver.WARP)  # of a head


@functools.cache
def _spec(dtype: torch.dtype, lanes: int) -> KernelSpec:
    return KernelSpec.make("append_heads.cu", bf16=dtype == torch.bfloat16, lanes=lanes)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_spec(dtype, lanes) for dtype in operands.DTYPES for lanes in _LANES]


def append_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    eps: float,
    plus_one: bool,
    round_first: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::append_heads`; the reference where the kernel may not.

    Args:
        query, key, value: [B, T, H, D] and twice [B, T, H', D], float16, bfloat16 or float32, not all empty.
        query_norm, key_norm: [D] or None.
        cos, sin: [B or 1, T, R], R even and at most D.
        keys, values: [B, H', L, D], contiguous.
        length: int64 [1] or [].
        eps, plus_one, round_first: as in `kbit.ops.norm_schemas`.
        out: [B, T, H, D], contiguous: the queries.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    batch, tokens, heads, columns = query.shape
    pieces, half = columns // operands.PIECE, cos.shape[-1] // (2 * operands.PIECE)
    strides = operands.all_pieces(query, key, value, cos, sin, query_norm, key_norm, keys, values)
    rows = batch * tokens * (heads + 2 * key.shape[2])
    whole = not columns % operands.PIECE and not cos.shape[-1] % (2 * operands.PIECE)
    takes = query.dtype in operands.DTYPES and whole and pieces <= max(_LANES)
    takes = takes and rows * max(_LANES) <= elementwise.MOST_THREADS
    if not takes or strides is None or strides[3] != strides[4]:
        tensors = query, key, value, query_norm, key_norm, cos, sin, keys, values, length
        reference.append_heads(*tensors, eps, plus_one, round_first, out)
        return
    lanes = next(count for count in _LANES if pieces <= count)
    index = query.device.index
    kernel = launcher.load(_spec(query.dtype, lanes), index, _FORMAT)
    places = operands.addresses(query, key, value, query_norm, key_norm, cos, sin, out, keys, values, length)
    by = (step for of_head in strides[:3] for step in of_head)
    along = operands.by_sequence(cos, strides[3])
    sizes = (rows, tokens, heads, key.shape[2], keys.shape[2], pieces, half)
    elementwise.launch(
        index, kernel, rows * lanes, (*places, *by, *along, *sizes, eps, plus_one, round_first)
    )
