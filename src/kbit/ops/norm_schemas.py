"""RMS norm as one op: schema, checks, and the fake kernel.

    y = torch.ops.kbit.rms_norm(x, weight, eps, plus_one, round_first)

x [..., D] / sqrt(mean of its squares + eps) * weight [D], in float32 (Zhang and Sennrich 2019,
arXiv:1910.07467). Models round it in different places: with `round_first` the quotient is rounded to x's
dtype before it is multiplied (Llama, Qwen3), else the product alone (OLMo 2, Qwen3-Next, Gemma); with
`plus_one` the weight is stored minus 1 (Qwen3-Next, Gemma).
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


def check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """Check the arguments of `kbit::rms_norm`.

    Raises:
        TypeError: x is not float, or the weight of another dtype.
        ValueError: shapes or devices do not belong together, or eps is negative or no number.
    """
    checks.float_dtype("rms_norm", "x", x.dtype)
    if weight.dtype != x.dtype:
        raise TypeError(f"rms_norm: weight must be {x.dtype} like x, got {weight.dtype}. Cast one of them.")
    if weight.dim() != 1 or x.shape[-1:] != weight.shape or x.device != weight.device:
        raise ValueError(
            f"rms_norm: x must be [..., D] and weight [D] on one device, got {tuple(x.shape)} on {x.device} "
            f"and {tuple(weight.shape)} on {weight.device}."
        )
    if not 0.0 <= eps < math.inf:
        raise ValueError(f"rms_norm: eps must be a number of 0 or more, got {eps}. Models have 1e-6 or so.")


@torch.library.register_fake("kbit::rms_norm", lib=LIBRARY)
def rms_norm(x, weight, eps, plus_one=False, round_first=True):  # noqa: D103
    check(x, weight, eps)
    return torch.empty_like(x, memory_format=torch.contiguous_format)
