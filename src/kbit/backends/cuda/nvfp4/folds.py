"""RMS norm and SiLU product, alone and with the quantizer behind them. Bits: `kbit.nvfp4.kernels`."""

from __future__ import annotations

import functools

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4.launch import SUB_BLOCK, THREADS, empty_coded, groups_of, run_items
from kbit.backends.dtype_codes import DTYPES

_NORM_FORMAT, _SILU_FORMAT = "QQQQQQQiiiffiii", "QQQQiiifiii"
_VECTOR = 8  # columns of a thread of the norm
_STATIC_BYTES = 64  # of shared memory, beside the row


@functools.cache
def norm_spec(dtype: torch.dtype, ties_even: bool, quantize: bool) -> KernelSpec:
    """The RMS norm of rows of a dtype."""
    code = DTYPES[dtype]
    return KernelSpec.make("nvfp4_rmsnorm.cu", dtype=code, ties_even=ties_even, quantize=quantize)


@functools.cache
def silu_spec(dtype: torch.dtype, ties_even: bool, quantize: bool) -> KernelSpec:
    """The SiLU product of a dtype."""
    code = DTYPES[dtype]
    return KernelSpec.make("nvfp4_silu_mul.cu", dtype=code, ties_even=ties_even, quantize=quantize)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    kinds = ((False, False), (False, True), (True, True))
    return [make(dtype, *kind) for make in (norm_spec, silu_spec) for dtype in DTYPES for kind in kinds]


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.rmsnorm`.

    Raises:
        ValueError: a row does not fit shared memory.
    """
    norm = torch.empty_like(x)
    h = x if residual is None else torch.empty_like(x)
    _norm(norm_spec(x.dtype, False, False), x, weight, eps, residual, h, norm, None, False, 1.0)
    return norm, h


def rmsnorm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    write_norm: bool,
    search: bool,
    ties_even: bool,
    global_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.rmsnorm_quantize`.

    Raises:
        ValueError: a row does not fit shared memory.
    """
    coded = empty_coded(x, *x.shape)
    norm = torch.empty_like(x) if write_norm else None
    h = x if residual is None else torch.empty_like(x)
    spec = norm_spec(x.dtype, ties_even, True)
    _norm(spec, x, weight, eps, residual, h, norm, coded, search, global_scale)
    return *coded, norm, h


def _norm(
    spec: KernelSpec,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    h: torch.Tensor,
    norm: torch.Tensor | None,
    coded: tuple[torch.Tensor, torch.Tensor] | None,
    search: bool,
    global_scale: float,
) -> None:
    (rows, columns), index = x.shape, x.device.index
    groups = groups_of(columns)
    shared = groups * SUB_BLOCK * x.element_size()
    limit = driver.device_limits(index).shared_bytes - _STATIC_BYTES
    if shared > limit:
        raise ValueError(
            f"rmsnorm: a row of {columns} {x.dtype} columns takes {shared} bytes of shared memory, the "
            f"device has {limit}. Use torch's norm and quantize."
        )
    if rows == 0:
        return
    dense = [t for t in (x, residual, h, norm) if t is not None]
    wide = columns % _VECTOR == 0 and all(t.data_ptr() % 16 == 0 for t in dense)
    codes, scales = (None, None) if coded is None else coded
    pointers = operands.addresses(x, residual, weight, h, norm, codes, scales)
    sizes = (columns, groups, DTYPES[weight.dtype], eps, global_scale)
    flags = (int(global_scale != 1.0), int(search), int(wide))
    kernel = launcher.load(spec, index, _NORM_FORMAT)
    launcher.launch_on(
        index, kernel, (rows, 1, 1), THREADS, (*pointers, *sizes, *flags), smem=shared, pdl=True
    )


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.silu_mul`."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    _silu(silu_spec(gate_up.dtype, False, False), gate_up, out, None, False, 1.0)
    return out


def silu_mul_quantize(
    gate_up: torch.Tensor, search: bool, ties_even: bool, global_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `kbit.nvfp4.kernels.Kernels.silu_mul_quantize`."""
    coded = empty_coded(gate_up, gate_up.shape[0], gate_up.shape[1] // 2)
    _silu(silu_spec(gate_up.dtype, ties_even, True), gate_up, None, coded, search, global_scale)
    return coded


def _silu(
    spec: KernelSpec,
    gate_up: torch.Tensor,
    out: torch.Tensor | None,
    coded: tuple[torch.Tensor, torch.Tensor] | None,
    search: bool,
    global_scale: float,
) -> None:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    groups = groups_of(columns)
    wide = columns % SUB_BLOCK == 0 and gate_up.data_ptr() % 16 == 0
    codes, scales = (None, None) if coded is None else coded
    pointers = operands.addresses(gate_up, out, codes, scales)
    numbers = (rows, columns, groups, global_scale, int(global_scale != 1.0), int(search), int(wide))
    run_items(spec, _SILU_FORMAT, gate_up.device, rows * groups, (*pointers, *numbers))
