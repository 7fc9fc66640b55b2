"""A step of gated delta linear attention, csrc/gated_delta.cu: which it takes, and its launch."""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import gated_delta as reference
from kbit.ops.gated_delta_schemas import heads_of_keys

_FORMAT = "Q" * 11 + "iif"
_DIM, _TAPS, _WARPS = 128, 4, 16  # warps of a head of values
_RATIOS = (1, 2)  # heads of values to one of keys


def _spec(dtype: torch.dtype, ratio: int) -> KernelSpec:
    return KernelSpec.make("gated_delta.cu", bf16=dtype == torch.bfloat16, heads=ratio, taps=_TAPS)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [_spec(dtype, ratio) for dtype in operands.DTYPES for ratio in _RATIOS]


def takes(dim: int, taps: int, ratio: float) -> bool:
    """Whether the kernel computes heads of `dim` columns, `ratio` of values to one of keys."""
    return (dim, taps) == (_DIM, _TAPS) and ratio in _RATIOS


def gated_delta_step(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """`kbit::gated_delta_step`; the reference where the kernel may not.

    Args:
        projected, gates, window, state, taps, log_decay, bias, norm, eps: as in
            `kbit.ops.gated_delta_schemas`.
        out: [B, V * D] of projected's dtype, contiguous.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    batch, v_heads, dim, _ = state.shape
    k_heads = heads_of_keys(projected, state)
    ratio, weights = v_heads // k_heads, (taps, log_decay, bias, norm)
    plain = takes(dim, taps.shape[1], ratio) and projected.dtype in operands.DTYPES
    rows = projected.stride(1) == gates.stride(1) == 1 and not state.data_ptr() % 16
    if not (plain and rows and all(tensor.is_contiguous() for tensor in weights)):
        reference.gated_delta_step(projected, gates, window, state, *weights, eps, out)
        return
    index = projected.device.index
    kernel = launcher.load(_spec(projected.dtype, ratio), index, _FORMAT)
    threads = ratio * _WARPS * driver.WARP
    prepared = launcher.Prepared(index, kernel, (batch * k_heads, 1, 1), threads)
    places = operands.addresses(projected, gates, window, state, *weights, out)
    sizes = projected.stride(0), gates.stride(0), k_heads, bias.dtype == torch.float32, eps
    prepared.launch((*places, *sizes))
