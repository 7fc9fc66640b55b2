"""`kbit.explain`: which kernel takes a product, and why not the others."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kbit.backends import cpu
from kbit.backends.cuda import grouped_preference, preference, tables
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.dispatch.backends import backend_for, backends
from kbit.format import type_checks
from kbit.format.scales import absmax_format
from kbit.format.tensor import QuantizedTensor
from kbit.format.words import counted, dtype_name
from kbit.ops import checks, forms


def explain(
    x_shape: Sequence[int],
    q: QuantizedTensor,
    dtype: torch.dtype = torch.bfloat16,
    activation: str | None = None,
) -> str:
    """Say which kernel `kbit.linear` or `kbit.grouped_linear` uses for a shape; nothing is computed.

    Args:
        x_shape: [..., K]; for experts [T, K], rows sorted by expert.
        q: weight [N, K], or of experts [E, N, K].
        dtype: of the activations.
        activation: None or "silu_and_mul".

    Returns:
        A few lines: the backend and why not an earlier one, then its kernels in the same way.

    Raises:
        TypeError: q is not quantized, x_shape no sizes, or dtype not float32, float16 or bfloat16.
        ValueError: the shape or activation does not fit the weight, or KBIT_BACKEND or KBIT_KERNEL force what
            cannot be.

    >>> print(kbit.explain((1, 256), q))
    1 token of 256 -> 64, 4 bits, bfloat16 on cpu
    ...
    """
    type_checks.quantized("explain", q)
    n, k = q.shape[-2:]
    sized = isinstance(x_shape, Sequence) and all(isinstance(size, int) and size >= 0 for size in x_shape)
    if not sized:
        what = repr(x_shape) if isinstance(x_shape, Sequence) else type(x_shape).__name__
        raise TypeError(f"explain: x_shape must be sizes such as (1, {k}), got {what}. Pass x.shape.")
    if not x_shape or x_shape[-1] != k:
        raise ValueError(
            f"explain: x of shape {tuple(x_shape)} does not fit a weight of {k} in-features. Give sizes that "
            f"end with {k}, such as (1, {k})."
        )
    experts = len(q.shape) == 3
    if experts and len(x_shape) != 2:
        raise ValueError(
            f"explain: x of experts is [T, {k}], rows sorted by expert; got {tuple(x_shape)}. Flatten it."
        )
    checks.float_dtype("explain", "dtype", dtype)
    fused = checks.is_silu_and_mul("explain", activation)
    if fused:
        checks.gate_and_up("explain", n)
    m = math.prod(x_shape[:-1])
    stored = absmax_format(q.absmax_format).dtype
    op = "grouped_linear" if experts else "linear"
    # As the product will find it: a weight that is to change to tiles does so in the first call.
    tiled = q.tiled is not None or (not q.stays_canonical and forms.tiles_pay(op, q.device, stored))
    op += "_tiled" * tiled
    chosen = backend_for(op, q.device, stored)
    name, each = dtype_name(dtype), f" in each of {q.shape[0]} experts" * experts
    lines = [f"{counted(m, 'token')} of {k} -> {n}{each}, {q.bits} bits, {name} on {q.device}"]
    for backend in backends:
        if backend is chosen:
            lines.append(f"backend {backend.name}: taken")
            break
        reason = backend.legal(op, q.device, stored)
        lines.append(f"backend {backend.name}: {reason or 'another one is forced'}")
    if chosen.name == "cuda":
        lines += _cuda_lines(m, dtype, q, fused) if tiled else ["  cublas: taken, on decoded weights"]
    elif chosen.name == "cpu":
        lines.append(f"  {_cpu_kernel(m, dtype, experts)}")
    return "\n".join(lines)


def _cpu_kernel(m: int, dtype: torch.dtype, experts: bool) -> str:
    panels = not experts and cpu.panels_win(m, dtype, cpu.variant())
    return f"instruction set {cpu.isa()}" + ", for decoding; torch multiplies" * panels


def _cuda_lines(m: int, dtype: torch.dtype, q: QuantizedTensor, silu_and_mul: bool) -> list[str]:
    index = q.device.index or 0
    n, k = q.shape[-2:]
    weight = WeightShape.of(q.codebook, index, n, k, silu_and_mul)
    if len(q.shape) == 3:
        reasons = grouped_preference.reasons(m, dtype, q.shape[0], weight)
    else:
        reasons = preference.reasons(m, dtype, weight, tables.for_device(index))
    return [f"  {kernel}: {reason}" for kernel, reason in reasons.items()]
