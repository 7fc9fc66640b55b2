"""What attention does with new tokens before it multiplies, as one op: schema, checks, and the fake kernel.

    query = torch.ops.kbit.append_heads(
        query, key, value, query_norm, key_norm, cos, sin, keys, values, length, eps, plus_one, round_first
    )

query [B, T, H, D], key and value [B, T, H', D] are projections of new tokens. Queries and keys are normed by
the weights query_norm and key_norm [D], as `kbit::rms_norm` does, unless both are None, and turned by cos and
sin [B or 1, T, R], as `kbit::rotary` does. Keys and values go to a cache of `length` rows, keys and values
[B, H', L, D], as `kbit::cache_append` writes them. Returned are the queries, [B, H, T, D].
"""

from __future__ import annotations

import torch

from kbit.ops import cache_schemas, norm_schemas, rotary_schemas
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "append_heads(Tensor query, Tensor key, Tensor value, Tensor? query_norm, Tensor? key_norm, Tensor cos, "
    "Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor length, float eps=0.0, bool plus_one=False, "
    "bool round_first=True) -> Tensor",
    tags=TAGS,
)


def check(
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
) -> None:
    """Check the arguments of `kbit::append_heads`.

    Raises:
        TypeError: dtypes do not belong together, or query is not float.
        ValueError: shapes or devices do not belong together, a cache is not contiguous, eps is negative or no
            number, or one norm is given without the other.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"append_heads: {name} must be [B, T, heads, D], got {tuple(tensor.shape)}.")
    norm_schemas.check_pair("append_heads", query_norm, key_norm)
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None and norm.dtype != query.dtype:
            raise TypeError(f"append_heads: {name} must be {query.dtype} like query, got {norm.dtype}.")
        if norm is not None and (norm.shape != query.shape[-1:] or norm.device != query.device):
            raise ValueError(
                f"append_heads: {name} must be [{query.shape[-1]}] on {query.device} like query's heads, got "
                f"{tuple(norm.shape)} on {norm.device}."
            )
    norm_schemas.check_eps("append_heads", eps)
    if value.shape != key.shape:
        raise ValueError(
            f"append_heads: value must be {tuple(key.shape)} like key, got {tuple(value.shape)}."
        )
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    rotary_schemas.check(query, key, cos, sin)
    cache_schemas.check(keys, values, key, value, length)


@torch.library.register_fake("kbit::append_heads", lib=LIBRARY)
def append_heads(  # noqa: D103
    query,
    key,
    value,
    query_norm,
    key_norm,
    cos,
    sin,
    keys,
    values,
    length,
    eps=0.0,
    plus_one=False,
    round_first=True,
):
    check(query, key, value, query_norm, key_norm, cos, sin, keys, values, length, eps)
    return rotary_schemas.output(query.transpose(1, 2))
