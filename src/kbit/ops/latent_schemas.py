"""A token's step of multi-head latent attention as one op: schema, checks, and the fake kernel.

    y = torch.ops.kbit.latent_attention_step(
        query, absorbed, latent, norm, cos, sin, mask, latents, keys, length, scaling, eps, plus_one,
        round_first, interleaved
    )

Attention of which the cache holds one latent and one turned key a token, for all heads, and not what these
are expanded to. A head's query for latents is its query times the weight that would expand keys (absorbed);
what comes back is a latent for each head, which the weight of values expands. With H heads, C columns of a
latent, R that are turned by their positions' angles, and room for L tokens:

    query       [B, H, R]       of the new token, not turned
    absorbed    [B, H, C]
    latent      [B, C + R]      of the new token: its latent, not normed, and its key, not turned
    norm        [C]             the weight of the latents' RMS norm; eps, plus_one, round_first: of that, as
                                in `kbit.ops.norm_schemas`
    cos, sin    [B or 1, R]
    mask        [B or 1, L]     is added to scores; or None
    latents     [B, L, C], written
    keys        [B, L, R], written
    length      int64, one number: tokens in the cache, behind which the new one is written if there is room
    scaling     of the scores
    interleaved whether pairs of neighbouring columns are turned; else a column and the one R/2 behind it.
                They lie R/2 apart afterwards either way
    y           [B, H, C]       sums of latents by the softmax of (absorbed . latent + query . key) * scaling
                                + mask over the cache and the new token; 0 where all of these are -inf

Everything but `length` is of one dtype. Methods: DeepSeek-AI 2024 (arXiv:2405.04434), Milakov and
Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

import torch

from kbit.ops import checks, norm_schemas, operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

NAME = "latent_attention_step"

LIBRARY.define(
    f"{NAME}(Tensor query, Tensor absorbed, Tensor latent, Tensor norm, Tensor cos, Tensor sin, "
    "Tensor? mask, Tensor(a!) latents, Tensor(b!) keys, Tensor length, float scaling, float eps, "
    "bool plus_one, bool round_first, bool interleaved) -> Tensor",
    tags=TAGS,
)


def check(
    query: torch.Tensor,
    absorbed: torch.Tensor,
    latent: torch.Tensor,
    norm: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    mask: torch.Tensor | None,
    latents: torch.Tensor,
    keys: torch.Tensor,
    length: torch.Tensor,
    eps: float,
) -> None:
    """Check the arguments of `kbit::latent_attention_step`.

    Raises:
        TypeError: query is not float, another tensor of another dtype, or length is not one int64.
        ValueError: shapes or devices do not belong together, a cache is not contiguous, R is odd, or eps is
            negative or no number.
    """
    checks.float_dtype(NAME, "query", query.dtype)
    norm_schemas.check_eps(NAME, eps)
    if absorbed.dim() != 3 or latents.dim() != 3 or cos.dim() != 2:
        dims = absorbed.dim(), latents.dim(), cos.dim()
        raise ValueError(f"{NAME}: absorbed, latents and cos must have 3, 3 and 2 dimensions, got {dims}.")
    (batch, heads, columns), room, turned = absorbed.shape, latents.shape[1], cos.shape[1]
    if turned % 2:
        raise ValueError(f"{NAME}: cos must have an even number of columns, got {turned}.")
    operand_checks.one_length(NAME, length, query.device)
    shared = batch if len(cos) == batch else 1
    rows = batch if mask is None or len(mask) == batch else 1
    shapes = {
        "query": (query, (batch, heads, turned)),
        "absorbed": (absorbed, (batch, heads, columns)),
        "latent": (latent, (batch, columns + turned)),
        "norm": (norm, (columns,)),
        "cos": (cos, (shared, turned)),
        "sin": (sin, (shared, turned)),
        "mask": (mask, (rows, room)),
        "latents": (latents, (batch, room, columns)),
        "keys": (keys, (batch, room, turned)),
    }
    expected = {name: (tensor, query.dtype, shape) for name, (tensor, shape) in shapes.items()}
    operand_checks.operands(NAME, query.device, expected)
    operand_checks.written_in_place(NAME, latents=latents, keys=keys)


@torch.library.register_fake(f"kbit::{NAME}", lib=LIBRARY)
def latent_attention_step(  # noqa: D103
    query,
    absorbed,
    latent,
    norm,
    cos,
    sin,
    mask,
    latents,
    keys,
    length,
    scaling,
    eps,
    plus_one,
    round_first,
    interleaved,
):
    check(query, absorbed, latent, norm, cos, sin, mask, latents, keys, length, eps)
    return absorbed.new_empty(absorbed.shape)
