"""Producer folds: the norm and the activation with the quantizer in one kernel, and each alone.

A fold keeps the stand-alone operation's reduction tree and rounds to the storage dtype where that one stores,
so it changes no bit: `rmsnorm_quantize_nvfp4` equals `rmsnorm` then `quantize_nvfp4`,
`silu_mul_quantize_nvfp4` equals `silu_mul` then `quantize_nvfp4`. None has a gradient: backward() through
what they return raises NotImplementedError, and so do transforms of torch.func.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kbit.format import type_checks
from kbit.nvfp4.formats import NVFP4Tensor
from kbit.nvfp4.kernels import kernels_for
from kbit.nvfp4.no_gradient import refuse_transforms, without_gradient
from kbit.nvfp4.quantize import check_rounding
from kbit.ops import checks


class Normed(NamedTuple):
    """What a folded norm gives.

    Attributes:
        quantized: the norm in NVFP4 [M, K].
        norm: the norm itself, which a router reads; None unless asked for.
        residual: x + residual in x's dtype, or x itself.
    """

    quantized: NVFP4Tensor
    norm: torch.Tensor | None
    residual: torch.Tensor


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm with defined bits; `kbit.nvfp4.kernels.Kernels.rmsnorm` states its reduction tree.

    Args:
        x: float16, bfloat16 or float32 [M, K].
        weight: one of these dtypes, [K].
        eps: added to the mean of squares.
        residual: x's dtype and shape; added first, the sum rounded to that dtype.

    Returns:
        norm and x + residual (or x), both of x's dtype [M, K].

    Raises:
        NotImplementedError: it is differentiated forwards or by torch.func, or called in torch.vmap.
        TypeError, ValueError: the arguments do not fit.
    """
    op = "rmsnorm"
    _check_norm(op, x, weight, eps, residual)
    refuse_transforms(op, "", x, weight, residual)
    kernels = kernels_for(x, weight=weight, residual=residual)
    norm, h = kernels.rmsnorm(_operand(x), _operand(weight), eps, _optional(residual))
    return without_gradient(norm, op, "", x, weight, residual), _sum(h, op, x, residual)


def rmsnorm_quantize_nvfp4(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    write_norm: bool = True,
    search: bool = True,
    ties: str = "zero",
    global_scale: float | None = None,
) -> Normed:
    """`rmsnorm`, its result quantized in the same pass.

    Args:
        x, weight, eps, residual: as in `rmsnorm`.
        write_norm: return the unquantized norm too.
        search, ties, global_scale: as in `quantize_nvfp4`.

    Returns:
        `Normed`: the norm in NVFP4, [M, K] in layout nv, codes and scales uint8; itself too if asked for.

    Raises:
        NotImplementedError: it is differentiated forwards or by torch.func, or called in torch.vmap.
        TypeError, ValueError: the arguments do not fit.

    >>> x, weight = torch.randn(2, 64), torch.ones(64)
    >>> rmsnorm_quantize_nvfp4(x, weight, eps=1e-6).quantized
    NVFP4Tensor(shape=(2, 64), layout=nv, bits_per_weight=4.50, device=cpu)
    """
    op = "rmsnorm_quantize_nvfp4"
    _check_norm(op, x, weight, eps, residual)
    type_checks.flag(op, "write_norm", write_norm)
    factor = check_rounding(search, ties, global_scale, op)
    refuse_transforms(op, "", x, weight, residual)
    kernels = kernels_for(x, weight=weight, residual=residual)
    operands = (_operand(x), _operand(weight), eps, _optional(residual))
    codes, scales, norm, h = kernels.rmsnorm_quantize(*operands, write_norm, search, ties == "even", factor)
    if norm is not None:
        norm = without_gradient(norm, op, "", x, weight, residual)
    return Normed(_tensor(codes, scales, factor, tuple(x.shape)), norm, _sum(h, op, x, residual))


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up with defined bits; `kbit.nvfp4.exact.exp` is its exp.

    Args:
        gate_up: float16, bfloat16 or float32 [R, 2I], a row's gate first.

    Returns:
        its dtype [R, I].

    Raises:
        NotImplementedError: it is differentiated forwards or by torch.func, or called in torch.vmap.
        TypeError, ValueError: the argument does not fit.
    """
    _check_gate_up("silu_mul", gate_up)
    refuse_transforms("silu_mul", "", gate_up)
    y = kernels_for(gate_up).silu_mul(_operand(gate_up))
    return without_gradient(y, "silu_mul", "", gate_up)


def silu_mul_quantize_nvfp4(
    gate_up: torch.Tensor, search: bool = True, ties: str = "zero", global_scale: float | None = None
) -> NVFP4Tensor:
    """`silu_mul`, its result quantized in the same pass.

    Args:
        gate_up: as in `silu_mul`.
        search, ties, global_scale: as in `quantize_nvfp4`.

    Returns:
        [R, I] in layout nv, codes and scales uint8.

    Raises:
        NotImplementedError: it is differentiated forwards or by torch.func, or called in torch.vmap.
        TypeError, ValueError: the arguments do not fit.
    """
    _check_gate_up("silu_mul_quantize_nvfp4", gate_up)
    factor = check_rounding(search, ties, global_scale, "silu_mul_quantize_nvfp4")
    refuse_transforms("silu_mul_quantize_nvfp4", "", gate_up)
    kernels = kernels_for(gate_up)
    codes, scales = kernels.silu_mul_quantize(_operand(gate_up), search, ties == "even", factor)
    return _tensor(codes, scales, factor, (len(gate_up), gate_up.shape[1] // 2))


def _tensor(
    codes: torch.Tensor, scales: torch.Tensor, global_scale: float, shape: tuple[int, ...]
) -> NVFP4Tensor:
    return NVFP4Tensor(codes, scales, torch.tensor(global_scale, dtype=torch.float32, device="cpu"), shape)


def _operand(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous()


def _optional(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else _operand(tensor)


def _sum(h: torch.Tensor, op: str, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """x + residual as a kernel gave it; without one x itself, which is no result."""
    return x if residual is None else without_gradient(h, op, "", x, residual)


def _check_norm(
    op: str, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
) -> None:
    for name, value in {"x": x, "weight": weight, "residual": x if residual is None else residual}.items():
        type_checks.tensor(op, name, value)
    checks.float_dtype(op, "x", x.dtype)
    checks.float_dtype(op, "weight", weight.dtype)
    if x.dim() != 2 or tuple(weight.shape) != tuple(x.shape[1:]):
        raise ValueError(
            f"{op}: x must be [M, K] and weight [K], got {tuple(x.shape)} and {tuple(weight.shape)}. Flatten "
            f"tokens: x.reshape(-1, x.shape[-1])."
        )
    if not isinstance(eps, int | float) or not eps >= 0:
        raise ValueError(f"{op}: eps must be a number >= 0, got {eps!r}. Models have about 1e-6.")
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        raise ValueError(
            f"{op}: residual must be {x.dtype} {tuple(x.shape)} like x, got {residual.dtype} "
            f"{tuple(residual.shape)}. Cast and reshape both alike."
        )


def _check_gate_up(op: str, gate_up: torch.Tensor) -> None:
    type_checks.tensor(op, "gate_up", gate_up)
    checks.float_dtype(op, "gate_up", gate_up.dtype)
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.shape[1]:
        raise ValueError(
            f"{op}: gate_up must be [R, 2I], a row's gate before as many ups, got {tuple(gate_up.shape)}. "
            f"Flatten tokens, and merge gate and up first."
        )
