"""The mask of causal attention as one op: schema, checks, and the fake kernel.

    mask = torch.ops.kbit.causal_mask(first, there, batch, tokens, keys, dtype)

[batch, 1, tokens, keys] in `dtype`, what is added to scores: 0 for the keys that a token sees, those up to
its own, -inf for others. The first token's own key is `first`, an int64 that is read on the device. `there`,
None or bool [batch, any], says which keys are there; those behind its end are not.
"""

from __future__ import annotations

import torch

from kbit.ops import checks, operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "causal_mask(Tensor first, Tensor? there, SymInt batch, SymInt tokens, SymInt keys, ScalarType dtype) "
    "-> Tensor",
    tags=TAGS,
)


def check(
    first: torch.Tensor,
    there: torch.Tensor | None,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
) -> None:
    """Check the arguments of `kbit::causal_mask`.

    Args:
        first, there, dtype: the op's.
        sizes: batch, tokens, keys.

    Raises:
        TypeError: a dtype is not the one that is wanted.
        ValueError: a size is negative, or shapes or devices do not belong together.
    """
    checks.float_dtype("causal_mask", "dtype", dtype)
    operand_checks.one_length("causal_mask", first, name="first")
    if min(sizes) < 0:
        raise ValueError(f"causal_mask: batch, tokens and keys must be 0 or more, got {sizes}.")
    if there is None:
        return
    if there.dtype != torch.bool:
        raise TypeError(f"causal_mask: there must be torch.bool, got {there.dtype}. Pass there.bool().")
    if there.dim() != 2 or len(there) != sizes[0]:
        raise ValueError(f"causal_mask: there must be [{sizes[0]}, any], got {tuple(there.shape)}.")
    if there.device != first.device:
        raise ValueError(
            f"causal_mask: there is on {there.device}, first on {first.device}. Move one of them."
        )


@torch.library.register_fake("kbit::causal_mask", lib=LIBRARY)
def causal_mask(first, there, batch, tokens, keys, dtype):  # noqa: D103
    check(first, there, (batch, tokens, keys), dtype)
    return first.new_empty((batch, 1, tokens, keys), dtype=dtype)
