"""A token's step of attention with shared heads of keys and values as one op: schema, checks, fake kernel.

    y = torch.ops.kbit.attention_step(
        query, key, value, gate, query_norm, key_norm, cos, sin, mask, keys, values, length, scaling, eps,
        plus_one, round_first
    )

What `kbit::append_heads` does with a token, attention to the cache then, and the gate behind it. With H query
heads, H' heads of keys and values, which divide H, D columns of a head, R that are turned by their positions'
angles, and room for L tokens:

    query       [B, H, D]       of the new token, neither normed nor turned
    key, value  [B, H', D]
    gate        [B, H, D]       what attention gives is multiplied by its sigmoid; or None
    query_norm, key_norm    [D] the weights of their RMS norms, or both None; eps, plus_one, round_first: of
                                these, as in `kbit.ops.norm_schemas`
    cos, sin    [B or 1, R]     a column is turned with the one R/2 behind it, as `kbit::rotary` does
    mask        [B or 1, L]     is added to scores; or None
    keys, values    [B, H', L, D], written
    length      int64, one number: tokens in the cache, behind which the new one is written if there is room
    scaling     of the scores
    y           [B, H, D]       sums of values by the softmax of (query . key) * scaling + mask over the cache
                                and the new token; 0 where all of these are -inf

Everything but `length` is of one dtype. Methods: Ainslie et al. 2023 (arXiv:2305.13245), Milakov and
Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import torch

from kbit.ops import checks, norm_schemas, operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

NAME = "attention_step"

LIBRARY.define(
    f"{NAME}(Tensor query, Tensor key, Tensor value, Tensor? gate, Tensor? query_norm, Tensor? key_norm, "
    "Tensor cos, Tensor sin, Tensor? mask, Tensor(a!) keys, Tensor(b!) values, Tensor length, "
    "float scaling, float eps=0.0, bool plus_one=False, bool round_first=True) -> Tensor",
    tags=TAGS,
)


def check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: torch.Tensor,
    eps: float,
) -> None:
    """Check the arguments of `kbit::attention_step`.

    Raises:
        TypeError: query is not float, another tensor of another dtype, or length is not one int64.
        ValueError: shapes or devices do not belong together, a cache is not contiguous, R is odd or more than
            D, one norm is given without the other, or eps is negative or no number.
    """
    checks.float_dtype(NAME, "query", query.dtype)
    norm_schemas.check_eps(NAME, eps)
    if query.dim() != 3 or keys.dim() != 4 or cos.dim() != 2:
        dims = query.dim(), keys.dim(), cos.dim()
        raise ValueError(f"{NAME}: query, keys and cos must have 3, 4 and 2 dimensions, got {dims}.")
    (batch, heads, columns), (_, shared, room, _), turned = query.shape, keys.shape, cos.shape[1]
    operand_checks.heads_of_keys(NAME, shared, heads)
    if turned % 2 or turned > columns:
        raise ValueError(
            f"{NAME}: cos must have an even number of columns, up to the {columns} of a head, got {turned}."
        )
    norm_schemas.check_pair(NAME, query_norm, key_norm)
    operand_checks.one_length(NAME, length, query.device)
    angles = batch if len(cos) == batch else 1
    rows = batch if mask is None or len(mask) == batch else 1
    shapes = {
        "key": (key, (batch, shared, columns)),
        "value": (value, (batch, shared, columns)),
        "gate": (gate, (batch, heads, columns)),
        "query_norm": (query_norm, (columns,)),
        "key_norm": (key_norm, (columns,)),
        "cos": (cos, (angles, turned)),
        "sin": (sin, (angles, turned)),
        "mask": (mask, (rows, room)),
        "keys": (keys, (batch, shared, room, columns)),
        "values": (values, (batch, shared, room, columns)),
    }
    expected = {name: (tensor, query.dtype, shape) for name, (tensor, shape) in shapes.items()}
    operand_checks.operands(NAME, query.device, expected)
    operand_checks.written_in_place(NAME, keys=keys, values=values)


@torch.library.register_fake(f"kbit::{NAME}", lib=LIBRARY)
def attention_step(  # noqa: D103
    query,
    key,
    value,
    gate,
    query_norm,
    key_norm,
    cos,
    sin,
    mask,
    keys,
    values,
    length,
    scaling,
    eps=0.0,
    plus_one=False,
    round_first=True,
):
    check(query, key, value, gate, query_norm, key_norm, cos, sin, mask, keys, values, length, eps)
    return query.new_empty(query.shape)
