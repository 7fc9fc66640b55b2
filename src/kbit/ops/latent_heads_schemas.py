"""All heads' keys of a prompt in multi-head latent attention as one op: schema, checks, and the fake kernel.

    keys, turned = torch.ops.kbit.latent_heads(query, expanded, key, cos, sin, interleaved)

With H heads of N columns that are not turned by their positions' angles and R behind these that are:

    query       [B, T, H, N + R], the last R columns of each head are turned in place
    expanded    [B, T, H, N + V], of each head what a latent is expanded to: the first N columns of its key,
                and its value
    key         [B, T, R], the rest of all heads' keys, not turned
    cos, sin    [B or 1, T, R]
    interleaved as in `kbit.ops.rotary_schemas`; so are the angles, and rounding
    keys        [B, T, H, N + R]
    turned      [B, T, R], of key: what a cache holds

Everything is of one dtype. Methods: DeepSeek-AI 2024 (arXiv:2405.04434), Su et al. 2021 (arXiv:2104.09864).
"""

from __future__ import annotations

import torch

from kbit.ops import checks, operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

NAME = "latent_heads"

LIBRARY.define(
    f"{NAME}(Tensor(a!) query, Tensor expanded, Tensor key, Tensor cos, Tensor sin, bool interleaved) "
    "-> (Tensor, Tensor)",
    tags=TAGS,
)


def check(
    query: torch.Tensor, expanded: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> None:
    """Check the arguments of `kbit::latent_heads`.

    Raises:
        TypeError: query is not float, or another tensor of another dtype.
        ValueError: shapes or devices do not belong together, R is odd, or heads of query or expanded have
            fewer columns than they need.
    """
    checks.float_dtype(NAME, "query", query.dtype)
    if query.dim() != 4 or expanded.dim() != 4 or key.dim() != 3 or cos.dim() != 3:
        dims = query.dim(), expanded.dim(), key.dim(), cos.dim()
        raise ValueError(
            f"{NAME}: query, expanded, key and cos must have 4, 4, 3 and 3 dimensions, got {dims}."
        )
    (batch, tokens, heads, columns), turned = query.shape, key.shape[2]
    if turned % 2 or not turned or columns < turned:
        raise ValueError(
            f"{NAME}: key must have an even number of columns up to query's {columns}, got {turned}."
        )
    if expanded.shape[3] < columns - turned:
        own = columns - turned
        raise ValueError(
            f"{NAME}: heads of expanded must have {own} columns or more, got {expanded.shape[3]}."
        )
    angles = (batch if len(cos) == batch else 1, tokens, turned)
    shapes = {
        "expanded": (expanded, (batch, tokens, heads, expanded.shape[3])),
        "key": (key, (batch, tokens, turned)),
        "cos": (cos, angles),
        "sin": (sin, angles),
    }
    expected = {name: (tensor, query.dtype, shape) for name, (tensor, shape) in shapes.items()}
    operand_checks.operands(NAME, query.device, expected)


@torch.library.register_fake(f"kbit::{NAME}", lib=LIBRARY)
def latent_heads(query, expanded, key, cos, sin, interleaved):  # noqa: D103
    check(query, expanded, key, cos, sin)
    return query.new_empty(query.shape), key.new_empty(key.shape)
