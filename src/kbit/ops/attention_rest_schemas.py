"""Attention of tokens behind those that a cache holds as one op: schema, checks, fake kernel.

    y = torch.ops.kbit.attention_rest(query, keys, values, length, scaling)

    query       [B, H, T, D]    of T tokens, T <= L
    keys, values    [B, H', L, D]   of a cache with room for L tokens, H' dividing H: of those in front,
                                and of these behind them; what is behind these is not looked at
    length      int64, one number: tokens in front of these, 0 to L - T; else y is no number of use
    scaling     of the scores
    y           [B, T, H, D]    sums of values by the softmax of (query . key) * scaling over the keys in
                                front of each token and its own

Everything but `length` is of one dtype. Methods: Dao 2023 (arXiv:2307.08691); putting parts together: Milakov
and Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import torch

from kbit.ops import checks, operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

NAME = "attention_rest"

LIBRARY.define(
    f"{NAME}(Tensor query, Tensor keys, Tensor values, Tensor length, float scaling) -> Tensor",
    tags=TAGS,
)


def check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: torch.Tensor) -> None:
    """Check the arguments of `kbit::attention_rest`.

    Raises:
        TypeError: query is not float, a cache of another dtype, or length is not one int64.
        ValueError: shapes or devices do not belong together.
    """
    checks.float_dtype(NAME, "query", query.dtype)
    operand_checks.one_length(NAME, length, query.device)
    if query.dim() != 4 or keys.dim() != 4:
        dims = query.dim(), keys.dim()
        raise ValueError(f"{NAME}: query and keys must have 4 dimensions, got {dims}.")
    (batch, heads, tokens, columns), (_, shared, room, _) = query.shape, keys.shape
    operand_checks.heads_of_keys(NAME, shared, heads)
    if tokens > room:
        raise ValueError(f"{NAME}: keys has room for {room} tokens, query has {tokens}.")
    cache = query.dtype, (batch, shared, room, columns)
    operand_checks.operands(NAME, query.device, {"keys": (keys, *cache), "values": (values, *cache)})


@torch.library.register_fake(f"kbit::{NAME}", lib=LIBRARY)
def attention_rest(query, keys, values, length, scaling):  # noqa: D103
    check(query, keys, values, length)
    batch, heads, tokens, columns = query.shape
    return query.new_empty(batch, tokens, heads, columns)
