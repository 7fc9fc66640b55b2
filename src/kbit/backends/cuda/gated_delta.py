"""A step of gated delta linear attention, csrc/gated_delta.cu: which it takes, and its launch."""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import gated_delta as reference
from kbit.ops.gated_delta_schemas import heads_of_keys

_FORMAT = "Q" * 11 + "iif"
_DIM, _TAPS = 128, 4
_RATIOS = (1, 2)  # heads of values to one of keys
# Of a block in a cluster; a block alone has all columns, and so many warps for each head.
_COLUMNS, _WARPS = 64, 8


def _blocks(ratio: int, arch: str) -> int:
    """Blocks that share a head of keys."""
    return ratio * _DIM // _COLUMNS if driver.since_hopper(arch) else 1


def _spec(dtype: torch.dtype, ratio: int, arch: str) -> KernelSpec:
    bf16, blocks = dtype == torch.bfloat16, _blocks(ratio, arch)
    columns = _COLUMNS if blocks > 1 else _DIM
    return KernelSpec.make(
        "gated_delta.cu", bf16=bf16, heads=ratio, taps=_TAPS, blocks=blocks, columns=columns, warps=_WARPS
    )


def specs(arch: str) -> list[KernelSpec]:
    """Every kernel of this module, for an architecture such as "90a"."""
    return [_spec(dtype, ratio, arch) for dtype in operands.DTYPES for ratio in _RATIOS]


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
    rows = projected.stride(1) == gates.stride(1) == 1
    rows = rows and not (state.data_ptr() % 16 or (window.data_ptr() | taps.data_ptr()) % 8)
    if not (plain and rows and all(tensor.is_contiguous() for tensor in weights)):
        reference.gated_delta_step(projected, gates, window, state, *weights, eps, out)
        return
    index = projected.device.index
    arch = driver.device_limits(index).arch
    kernel, blocks = launcher.load(_spec(projected.dtype, ratio, arch), index, _FORMAT), _blocks(ratio, arch)
    warps = _WARPS if blocks > 1 else ratio * _WARPS
    grid = (batch * k_heads * blocks, 1, 1)
    prepared = launcher.Prepared(index, kernel, grid, warps * driver.WARP, cluster=blocks)
    places = operands.addresses(projected, gates, window, state, *weights, out)
    sizes = projected.stride(0), gates.stride(0), k_heads, bias.dtype == torch.float32, eps
    prepared.launch((*places, *sizes))
