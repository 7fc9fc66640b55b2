"""Attention of tokens behind those that a cache holds: FlashAttention by parts of the cache, put together.

FlashAttention-2 (Dao 2023, arXiv:2307.08691), as PyTorch has it, takes lengths that only the GPU knows, but
gives a block 64 or 128 tokens of a head: 64 tokens of 32 heads are 32 blocks, for an H200's 132
multiprocessors. So the keys in front are split; csrc/attention_parts.cu and csrc/attention_merge.cu are
around its two calls. Behind 6600 tokens that took 61 us, and cuDNN with a mask 174; with 256 tokens of 16
heads of 256 columns 110, and 443.
"""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, elementwise, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import attention_rests as reference

_PARTS_FORMAT, _MERGE_FORMAT = "QQQQ" + "QQ" + "i" * 6, "QQQQQ" + "i" * 5
_PARTS = KernelSpec.make("attention_parts.cu")
# FlashAttention's: of a head; tokens of a block, by columns of a head up to some.
_MOST_COLUMNS, _TILES = 256, {128: 128, 256: 64}
# A block takes so much longer if it has a multiprocessor to itself. Putting a part's rows together takes this
# share of a block's time: measured behind 1700 and 6600 tokens.
_MOST_SPLITS, _ALONE, _PER_SPLIT = 8, 1.15, 0.02


def _merge(dtype: torch.dtype) -> KernelSpec:
    return KernelSpec.make("attention_merge.cu", bf16=dtype == torch.bfloat16)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_PARTS, *map(_merge, operands.DTYPES)]


def splits_of(tokens: int, heads: int, columns: int, multiprocessors: int) -> int:
    """Into how many parts keys are split for so many tokens, by what the busiest multiprocessor then does."""
    blocks = heads * -(-tokens // next(tile for most, tile in _TILES.items() if columns <= most))

    def cost(splits: int) -> float:
        turns = -(-blocks * splits // multiprocessors)
        return max(turns, _ALONE) / splits + _PER_SPLIT * splits * max(1.0, blocks / multiprocessors)

    return min(range(1, _MOST_SPLITS + 1), key=cost)


def takes(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether `attention_rest` has kernels for such tensors on a GPU."""
    plain = query.dtype in operands.DTYPES and keys.shape == values.shape
    plain = plain and (not query.is_cuda or torch.backends.cuda.is_flash_attention_available())
    sizes = query.shape[-1] <= _MOST_COLUMNS and not query.shape[-1] % operands.PIECE
    aligned = None not in map(operands.pieces, (query, keys, values))
    return plain and sizes and aligned and _MOST_SPLITS * query[0].numel() <= elementwise.MOST_THREADS


def attention_rest(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
    out: torch.Tensor,
) -> None:
    """`kbit::attention_rest`; the reference where there is no kernel.

    Args:
        query, keys, values, length, scaling: as in `kbit.ops.attention_rest_schemas`.
        out: [B, T, H, D], contiguous, one element or more.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    if not takes(query, keys, values):
        reference.attention_rest(query, keys, values, length, scaling, out)
        return
    for its in zip(query.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2), out, strict=True):
        _of_sequence(*its, length, scaling)


def _of_sequence(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    length: torch.Tensor,
    scaling: float,
) -> None:
    """query, out [T, H, D], keys, values [L, H', D]."""
    (tokens, heads, columns), index = query.shape, query.device.index
    splits = splits_of(tokens, heads, columns, driver.device_limits(index).multiprocessors)
    queries, starts = query, length.new_empty(2 * splits + 4, dtype=torch.int32)
    pieces = columns // operands.PIECE
    count = tokens * heads * pieces
    if splits > 1:
        queries = query.new_empty(splits * tokens, heads, columns)
    kernel = launcher.load(_PARTS, index, _PARTS_FORMAT)
    copied = count if splits > 1 else 0
    strides = operands.pieces(query) or ()
    sizes = copied, heads, pieces, tokens, len(keys), splits
    elementwise.launch(
        index,
        kernel,
        max(copied, splits + 1),
        (*operands.addresses(query, length, queries, starts), *strides, *sizes),
    )
    rows, cuts, its = starts.split([splits + 1, splits + 1, 2])
    own, own_sums = _flash(query, keys, values, rows[:2], its, tokens, True, scaling)
    if splits == 1:
        out.copy_(own)
        return
    parts, sums = _flash(queries, keys, values, rows, cuts, tokens, False, scaling)
    kernel = launcher.load(_merge(query.dtype), index, _MERGE_FORMAT)
    places = operands.addresses(parts, sums, own, own_sums, out)
    elementwise.launch(index, kernel, count, (*places, count, heads, pieces, tokens, splits))


def _flash(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    cuts: torch.Tensor,
    tokens: int,
    causal: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What sequences of queries give with keys of theirs, [rows, H, D], and logarithms of sums, [H, rows]."""
    most = tokens, len(keys)
    flash = torch.ops.aten._flash_attention_forward
    out, sums, *_ = flash(query, keys, values, rows, cuts, *most, 0.0, causal, False, scale=scaling)
    return out.contiguous(), sums.contiguous()
