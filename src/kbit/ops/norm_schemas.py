"""RMS norm as one op, and of a sum: schemas, checks, and the fake kernels.

    y = torch.ops.kbit.rms_norm(x, weight, eps, plus_one, round_first)
    total, y = torch.ops.kbit.add_rms_norm(x, added, weight, eps, plus_one, round_first)

x [..., D] / sqrt(mean of its squares + eps) * weight [D], in float32 (Zhang and Sennrich 2019,
arXiv:1910.07467). Models round it in different places: with `round_first` the quotient is rounded to x's
dtype before it is multiplied (Llama, Qwen3), else the product alone (OLMo 2, Qwen3-Next, Gemma); with
`plus_one` the weight is stored minus 1 (Qwen3-Next, Gemma). The second is the norm of total = x + added,
rounded to their dtype, as it follows every residual connection of a transformer.
"""

from __future__ import annotations

import math

import torch

from kbit.ops import checks
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool plus_one=False, bool round_first=True) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    "add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps, bool plus_one=False, "
    "bool round_first=True) -> (Tensor, Tensor)",
    tags=TAGS,
)


def check(x: torch.Tensor, weight: torch.Tensor, eps: float, name: str = "rms_norm") -> None:
    """Check the arguments of `kbit::rms_norm`, or of the op of that name.

    Raises:
        TypeError: x is not float, or the weight of another dtype.
        ValueError: shapes or devices do not belong together, or eps is negative or no number.
    """
    checks.float_dtype(name, "x", x.dtype)
    if weight.dtype != x.dtype:
        raise TypeError(f"{name}: weight must be {x.dtype} like x, got {weight.dtype}. Cast one of them.")
    if weight.dim() != 1 or x.shape[-1:] != weight.shape or x.device != weight.device:
        raise ValueError(
            f"{name}: x must be [..., D] and weight [D] on one device, got {tuple(x.shape)} on {x.device} "
            f"and {tuple(weight.shape)} on {weight.device}."
        )
    check_eps(name, eps)


def check_eps(name: str, eps: float) -> None:
    """Check what is added to the mean, for the op of that name.

    Raises:
        ValueError: eps is negative or no number.
    """
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"{name}: eps must be a number of 0 or more, got {eps}. Models have 1e-6 or so.")


def check_pair(op: str, query_norm: torch.Tensor | None, key_norm: torch.Tensor | None) -> None:
    """Raise ValueError for a norm of queries without one of keys, or the other way round."""
    if (query_norm is None) != (key_norm is None):
        raise ValueError(f"{op}: query_norm and key_norm are given both, or neither.")


def check_sum(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Check the arguments of `kbit::add_rms_norm`.

    Raises:
        TypeError: as `check`, or added has another dtype than x.
        ValueError: as `check`, or added has another shape than x or is elsewhere.
    """
    check(x, weight, eps, "add_rms_norm")
    if added.dtype != x.dtype:
        raise TypeError(f"add_rms_norm: added must be {x.dtype} like x, got {added.dtype}. Cast one of them.")
    if added.shape != x.shape or added.device != x.device:
        raise ValueError(
            f"add_rms_norm: added must be {tuple(x.shape)} on {x.device} like x, got {tuple(added.shape)} on "
            f"{added.device}."
        )


@torch.library.register_fake("kbit::rms_norm", lib=LIBRARY)
def rms_norm(x, weight, eps, plus_one=False, round_first=True):  # noqa: D103
    check(x, weight, eps)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("kbit::add_rms_norm", lib=LIBRARY)
def add_rms_norm(x, added, weight, eps, plus_one=False, round_first=True):  # noqa: D103
    check_sum(x, added, weight, eps)
    total, y = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
    return total, y
