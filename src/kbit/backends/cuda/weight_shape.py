"""A weight as choices and plans of launches see it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kbit.backends.cuda import driver
from kbit.format.codebook import bits_of
from kbit.format.symmetry import is_symmetric


class WeightShape(NamedTuple):
    """One matrix W of y[M, N] = x[M, K] @ W^T, or each of several experts', and the GPU that it is on.

    A tuple, and its device too: every launch looks plans up by it, for which data classes take a microsecond.

    Attributes:
        out_features, in_features: N and K.
        bits: code width.
        gated: whether rows are N / 2 gates and as many ups, multiplied as silu(gate) * up.
        device: limits of the GPU.
        symmetric: whether the codebook is symmetric around 0, which matters at 5 bits.
    """

    out_features: int
    in_features: int
    bits: int
    gated: bool
    device: driver.DeviceLimits
    symmetric: bool = True

    @classmethod
    def of(
        cls, codebook: torch.Tensor, index: int, out_features: int, in_features: int, gated: bool
    ) -> WeightShape:
        """That of a weight with a codebook [2^bits] on the GPU that torch counts as `index`."""
        limits, symmetric = driver.device_limits(index), is_symmetric(codebook)
        return cls(out_features, in_features, bits_of(codebook), gated, limits, symmetric)
