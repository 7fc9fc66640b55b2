"""y = x @ W^T on the GPU: which kernel takes a problem, and decoding + cuBLAS for the rest.

Operands are contiguous, on one CUDA device, and checked by the op layer. Nothing waits for the device.
KBIT_KERNEL=stream (one weight), grouped (experts), wgmma or cublas forces a kernel; where that may not take a
problem, the error says why.
"""

from __future__ import annotations

import functools
import os

import torch
import torch.nn.functional as F

from kbit.backends.cuda import driver, grouped, operands, rows, stream, wgmma

KERNELS = ("stream", "grouped", "wgmma", "cublas")
# Weights decoded at a time for cuBLAS: 256 MB of 16-bit weights, more than a layer of most models.
_CHUNK_WEIGHTS = 128 * 2**20
# Off Hopper, so many tokens are taken 16 at a time: four readings of 4-bit weights are one of 16-bit ones.
_STREAM_TOKENS = 64
# On Hopper, small weights for many tokens: decoding costs little and cuBLAS fills the machine better. 2048 x
# 512 by 4096 tokens on an H200: wgmma 19.7 us, cuBLAS alone 13.2.
_SMALL_WEIGHTS, _MANY_TOKENS = 2**21, 2048


def choose(m: int, dtype: torch.dtype, out_features: int, in_features: int, gated: bool, arch: str) -> str:
    """The kernel for a problem: the one that KBIT_KERNEL names, or the fastest by measurement.

    Raises:
        ValueError: KBIT_KERNEL names none, or one that may not take this problem.
    """
    refusals = _refusals(m, dtype, out_features, gated, arch)
    forced = _forced(refusals)
    if forced:
        return forced
    many = m >= _MANY_TOKENS and out_features * in_features <= _SMALL_WEIGHTS
    if refusals["stream"] is None and (m <= stream.TOKENS[-1] or refusals["wgmma"] is not None):
        return "stream"
    return "wgmma" if refusals["wgmma"] is None and not many else "cublas"


def _forced(refusals: dict[str, str | None]) -> str | None:
    forced = os.environ.get("KBIT_KERNEL")
    if not forced:
        return None
    if forced not in KERNELS:
        raise ValueError(f"KBIT_KERNEL is {forced!r}; known: {', '.join(KERNELS)}.")
    if forced not in refusals:  # stream is for one weight, grouped for experts
        return None
    if (reason := refusals[forced]) is not None:
        raise ValueError(f"KBIT_KERNEL={forced} cannot run this: {reason}. Unset it, or set another.")
    return forced


def reasons(
    m: int,
    dtype: torch.dtype,
    out_features: int,
    in_features: int,
    bits: int,
    gated: bool,
    device: driver.DeviceLimits,
) -> dict[str, str]:
    """For every kernel in words whether it is taken, could be, or may not, and the launch of the taken one.

    Raises:
        ValueError: see `choose`.
    """
    chosen = choose(m, dtype, out_features, in_features, gated, device.arch)
    words = {}
    for kernel, refusal in _refusals(m, dtype, out_features, gated, device.arch).items():
        words[kernel] = "taken" if kernel == chosen else refusal or "could take it, slower by measurement"
    shape = (out_features, in_features, bits, gated, device)
    if chosen == "stream":
        plan = stream.plan(min(m, stream.TOKENS[-1]), *shape)
        launches = -(-m // stream.TOKENS[-1])
        words[chosen] += f", {launches} x {plan.grid} blocks of {plan.workers} + 1 warps"
    elif chosen == "wgmma":
        tiles = wgmma.plan(m, *shape)
        words[chosen] += f", {tiles.grid} blocks of {tiles.tokens} tokens in clusters of {tiles.cluster}"
    return words


@functools.lru_cache(maxsize=4096)
def _refusals(m: int, dtype: torch.dtype, out_features: int, gated: bool, arch: str) -> dict[str, str | None]:
    """Why each kernel may not take a problem, or None."""
    at_once = min(m, stream.TOKENS[-1]) if m <= _STREAM_TOKENS else m
    return {
        "stream": stream.refusal(at_once, dtype, out_features, gated),
        "wgmma": wgmma.arch_refusal(arch) or operands.refusal(dtype, out_features, gated),
        "cublas": None,
    }


def linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """Multiply by a weight in the tiled layout.

    Args:
        x: [M, K], float16, bfloat16 or float32 (decoded to float32 and multiplied by cuBLAS), M >= 1.
        tiled: int32 [row tiles, column tiles, words]; see `kbit.backends.cuda.layout`.
        codebook: float32 [2^bits].
        scale: float32, the matrix's factor.
        bias: [N] of x's dtype.
        out_features: N.
        in_features: K.
        silu_and_mul: the rows of W are gates and then as many ups; out is silu(gate) * up.
        out: [M, N], or [M, N / 2] with silu_and_mul.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL is wrong; see `choose`.
    """
    arch = driver.device_arch(x.device.index)
    kernel = choose(x.shape[0], x.dtype, out_features, in_features, silu_and_mul, arch)
    weight = (tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    if kernel == "stream":
        for part in range(0, x.shape[0], stream.TOKENS[-1]):
            tokens = slice(part, part + stream.TOKENS[-1])
            stream.linear(x[tokens], *weight, out[tokens])
        return
    if kernel == "wgmma":
        wgmma.linear(x, *weight, out)
        return
    _linear_cublas(x, *weight, out)


def _linear_cublas(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """Decode + cuBLAS."""
    target = x.new_empty((x.shape[0], out_features)) if silu_and_mul else out
    bits = codebook.shape[0].bit_length() - 1

    def decode(first: int, w: torch.Tensor) -> None:
        rows.dequantize_tiled(tiled, codebook, scale, bits, first, w)

    _multiply_decoded(x, decode, bias, target)
    if silu_and_mul:
        gate, up = target.chunk(2, dim=-1)
        torch.mul(F.silu(gate), up, out=out)


def grouped_linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    source: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Multiply rows sorted by expert, each by its expert's weight, in one launch; nothing waits for the device.

    Args:
        x: [T, K], float16 or bfloat16; float32 goes expert by expert on the host's word.
        tiled: int32 [E, row tiles, column tiles, words].
        codebook: float32 [2^bits].
        scale: float32 [E].
        offsets: int32 [E + 1]; rows offsets[e] to offsets[e + 1] are e's. Others become zero.
        out_features: N.
        in_features: K.
        silu_and_mul: the rows of a W are gates and then as many ups; out is silu(gate) * up.
        source: int32 [R], the row of x that a sorted row is; None if x is sorted.
        out: [R, N], or [R, N / 2] with silu_and_mul.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL is wrong; see `choose`.
    """
    bits, limits = codebook.shape[0].bit_length() - 1, driver.device_limits(x.device.index)
    shape = (tiled.shape[0], out_features, in_features, bits, silu_and_mul)
    kernel = choose_grouped(out.shape[0], x.dtype, *shape, limits)
    weight, sizes = (tiled, codebook, scale, offsets), (out_features, in_features, silu_and_mul)
    if kernel == "grouped":
        grouped.linear(x, *weight, source, *sizes, out)
        return
    if source is not None:
        x = x.index_select(0, source)
    if kernel == "wgmma":
        wgmma.grouped_linear(x, *weight, *sizes, out)
        return
    out.zero_()
    bounds = offsets.tolist()
    for expert in range(tiled.shape[0]):
        rows_now = slice(bounds[expert], bounds[expert + 1])
        if bounds[expert] < bounds[expert + 1]:
            matrix = (tiled[expert], codebook, scale[expert])
            _linear_cublas(x[rows_now], *matrix, None, *sizes, out[rows_now])


def choose_grouped(
    m: int,
    dtype: torch.dtype,
    experts: int,
    out_features: int,
    in_features: int,
    bits: int,
    gated: bool,
    device: driver.DeviceLimits,
) -> str:
    """The kernel for m rows dealt to experts in some way: see `choose`.

    "cublas", one expert after the other, waits for the device and is only taken for float32 and if forced.

    Raises:
        ValueError: as `choose`.
    """
    refusals = {
        "grouped": grouped.refusal(dtype, experts, out_features, in_features, bits, gated, device),
        "wgmma": wgmma.arch_refusal(device.arch)
        or operands.grouped_refusal(dtype, out_features, gated, experts),
        "cublas": None,
    }
    forced = _forced(refusals)
    if forced:
        return forced
    few = m <= grouped.TOKENS[-1] * experts
    if refusals["grouped"] is None and (few or refusals["wgmma"] is not None):
        return "grouped"
    return "wgmma" if refusals["wgmma"] is None else "cublas"


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out: torch.Tensor,
) -> None:
    """Multiply by a weight in the canonical form [N, K], any block scale format: decode + cuBLAS."""

    def decode(first: int, w: torch.Tensor) -> None:
        part = slice(first, first + w.shape[0])
        rows.dequantize(packed[part], absmax[part], codebook, scale, in_features, w)

    _multiply_decoded(x, decode, bias, out)


def _multiply_decoded(x, decode, bias, out: torch.Tensor) -> None:
    """out = x @ W^T + bias, W decoded by `decode(first row, rows to write)` in bounded chunks of N."""
    n, k = out.shape[-1], x.shape[-1]
    chunk = max(1, _CHUNK_WEIGHTS // k)
    w = x.new_empty((min(n, chunk), k))
    for first in range(0, n, chunk):
        rows_now = w[: min(chunk, n - first)]
        decode(first, rows_now)
        part = slice(first, first + rows_now.shape[0])
        if bias is None:
            torch.mm(x, rows_now.t(), out=out[:, part])
        else:
            torch.addmm(bias[part], x, rows_now.t(), out=out[:, part])
