"""y = x @ W^T on the GPU, by the kernel that `kbit.backends.cuda.preference` takes for a problem.

Operands are contiguous, on one CUDA device, and checked by the op layer. Nothing waits for the device
unless its docstring says so.
"""

from __future__ import annotations

import functools

import torch

from kbit.backends import environment
from kbit.backends.cuda import (
    decoded,
    driver,
    grouped,
    grouped_preference,
    mma,
    one_token,
    operands,
    resident,
    routing,
    stream,
    tables,
    wgmma,
)
from kbit.backends.cuda.preference import Choice, decide, decided
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.backends.reference.products import groups
from kbit.format.codebook import bits_of
from kbit.format.symmetry import is_symmetric
from kbit.ops import moe_schemas


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
        tiled: int32 [row tiles, column tiles, words]; see `kbit.format.layout`.
        codebook: float32 [2^bits].
        scale: float32, the matrix's factor.
        bias: [N] of x's dtype.
        out_features: N.
        in_features: K.
        silu_and_mul: the rows of W are gates and then as many ups; out is silu(gate) * up.
        out: [M, N], or [M, N / 2] with silu_and_mul.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL is wrong; see `decide`.
    """
    index = x.device.index
    weight = WeightShape.of(codebook, index, out_features, in_features, silu_and_mul)
    choice = decide(x.shape[0], x.dtype, weight, tables.for_device(index))
    launch(choice, x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul, out)


def linear_in_one_launch(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> bool:
    """`linear_tiled` of operands as a layer has them, if a kernel takes them as they are, all at once.

    A tenth of `linear_tiled`'s steps: decoding without a CUDA graph waits for the CPU.

    Args:
        x, out: [..., K] and [..., N], 16 bits; the others as in `linear_tiled`, of any strides and addresses.

    Returns:
        Whether it was launched.

    Raises:
        KbitError, ValueError: see `linear_tiled`.
    """
    index = x.device.index
    code = (bits_of(codebook), is_symmetric(codebook))
    problem = (x.numel() // in_features, x.dtype, *code, out_features, in_features, silu_and_mul)
    one = _one_launch(environment.kernel(), index, tables.for_device(index), *problem)
    if one is None or (x.data_ptr() | tiled.data_ptr()) % 16 or not (bias is None or bias.is_contiguous()):
        return False
    if not (x.is_contiguous() and tiled.is_contiguous() and codebook.is_contiguous()):
        return False
    one.launch(x, tiled, codebook, scale, bias, out)
    return True


@functools.lru_cache(maxsize=4096)
def _one_launch(
    named: str | None,
    index: int,
    known: tuple[tables.Table, ...],
    m: int,
    dtype: torch.dtype,
    bits: int,
    symmetric: bool,
    out_features: int,
    in_features: int,
    gated: bool,
) -> stream.Prepared | wgmma.Prepared | None:
    """The one launch that is what `decide` wants, without a copy of x; None if there is none such."""
    if not m or not out_features or operands.padded(in_features) != in_features:
        return None
    weight = WeightShape(out_features, in_features, bits, gated, driver.device_limits(index), symmetric)
    choice = decided(named, m, dtype, weight, known)
    if choice.kernel == "stream" and m <= stream.TOKENS[-1]:
        return stream.prepared(index, m, dtype, weight)
    return wgmma.prepare(index, choice.plan, m, dtype, weight) if choice.plan is not None else None


def launch(
    choice: Choice,
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
    """`linear_tiled` by the chosen kernel, which may take the problem."""
    weight = (tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    if choice.kernel == "stream":
        stream.linear(x, *weight, out)
    elif choice.kernel == "wgmma":
        wgmma.linear(x, *weight, out, choice.plan)
    elif choice.kernel == "mma":
        mma.linear(x, *weight, out)
    else:
        decoded.linear_tiled(x, *weight, out)


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
    settled: bool = False,
) -> str:
    """Multiply rows sorted by expert, each by its expert's weight.

    Nothing waits, except where cuBLAS multiplies expert by expert (float32, more experts than kernels list,
    or forced): then the host reads the offsets.

    Args:
        x: [T, K], float16, bfloat16 or float32.
        tiled: int32 [E, row tiles, column tiles, words].
        codebook: float32 [2^bits].
        scale: float32 [E].
        offsets: int32 [E + 1]; rows offsets[e] to offsets[e + 1] are e's. Others become zero.
        out_features: N.
        in_features: K.
        silu_and_mul: the rows of a W are gates and then as many ups; out is silu(gate) * up.
        source: int32 [R], the row of x that a sorted row is; None if x is sorted.
        out: [R, N], or [R, N / 2] with silu_and_mul.
        settled: the last kernel of the stream is one for which this returned "grouped", and offsets were
            there before it; they may be read, and weights be asked for, while it still runs.

    Returns:
        The kernel that was launched last; "cublas" stands for PyTorch's, too.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL is wrong; see `kbit.backends.cuda.grouped_preference.choose`.
    """
    if silu_and_mul and operands.refusal(torch.float16, out_features, silu_and_mul):
        # Gates end within a tile: activate in a pass of its own, so that nothing has to wait.
        both = x.new_empty((out.shape[0], out_features))
        weight = (tiled, codebook, scale, offsets)
        grouped_linear_tiled(x, *weight, out_features, in_features, False, source, both)
        operands.activate(both, out)
        return "cublas"
    shape = WeightShape.of(codebook, x.device.index, out_features, in_features, silu_and_mul)
    kernel = grouped_preference.choose(out.shape[0], x.dtype, tiled.shape[0], shape)
    weight, sizes = (tiled, codebook, scale, offsets), (out_features, in_features, silu_and_mul)
    if kernel == "grouped":
        grouped.linear(x, *weight, source, *sizes, out, settled=settled)
    elif kernel == "resident":
        resident.linear(x, *weight, source, *sizes, out)
    else:
        x = x if source is None else x.index_select(0, source)
        if kernel == "wgmma":
            wgmma.grouped_linear(x, *weight, *sizes, out)
        elif kernel == "mma":
            mma.grouped_linear(x, *weight, *sizes, out)
        else:
            out.zero_()
            for expert, rows_now in groups(offsets):
                matrix = (tiled[expert], codebook, scale[expert])
                decoded.linear_tiled(x[rows_now], *matrix, None, *sizes, out[rows_now])
    return kernel


def experts_tiled(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    codebook: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down_scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    intermediate: int,
    out: torch.Tensor,
) -> None:
    """A layer of experts: one token in two launches of stream.cu without sorting, more of them sorted.

    One token is sorted, too, where stream.cu may not take it, or KBIT_KERNEL names another kernel. In float32
    the host then waits for the device.

    Args:
        x: [T, H], T >= 1, float16, bfloat16 or float32.
        gate_up, down: int32 [E, row tiles, column tiles, words].
        codebook: float32 [2^bits].
        gate_up_scale, down_scale: float32 [E].
        ids, weights: [T, U].
        intermediate: I.
        out: [T, H].

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
        ValueError: KBIT_KERNEL is wrong; see `kbit.backends.cuda.grouped_preference.choose`.
    """
    hidden, (tokens, slots) = x.shape[1], ids.shape
    arch = driver.device_arch(x.device.index)
    if tokens == 1 and one_token.is_chosen(x.dtype, weights.dtype, intermediate, slots, arch):
        rows = x.new_empty((slots, intermediate))
        one_token.rows(x, gate_up, codebook, gate_up_scale, ids[0], 2 * intermediate, hidden, True, rows)
        one_token.columns(rows, down, codebook, down_scale, ids[0], weights[0], hidden, intermediate, out)
        return
    source, bounds, inverse = moe_schemas.empty_routing(ids, gate_up.shape[0])
    routing.moe_align(ids, source, bounds, inverse)
    rows, results = (x.new_empty((tokens * slots, columns)) for columns in (intermediate, hidden))
    first, second = (gate_up, codebook, gate_up_scale, bounds), (down, codebook, down_scale, bounds)
    kernel = grouped_linear_tiled(x, *first, 2 * intermediate, hidden, True, source, rows)
    settled = kernel == "grouped"
    grouped_linear_tiled(rows, *second, hidden, intermediate, False, None, results, settled)
    routing.moe_combine(results, inverse, weights, bounds, out)
