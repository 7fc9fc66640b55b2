"""Gated delta linear attention, csrc/gated_delta*.cu: what the kernels take, and their launches."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.reference import gated_delta as reference
from kbit.ops.gated_delta_schemas import Heads, heads_of_keys

_FORMAT = "Q" * 11 + "iif"
DIM, _TAPS = 128, 4
# Heads of values to one of keys, where projections are by heads of keys and where they are not.
_RATIOS = {True: (1, 2), False: (1, 2, 3, 4)}
RATIOS = _RATIOS[False]  # all of them
_ALONE = 2  # most that one block has
# Of a block in a cluster; a block alone has all columns, and so many warps for each head.
_COLUMNS, _WARPS = 64, 8
_INPUTS_FORMAT, _OUTPUT_FORMAT = "Q" * 15 + "iiiii", "Q" * 6 + "if"
# Tokens of a thread of gated_delta_inputs.cu, of short prompts and others; threads of a block, of either
# kernel of prompts.
_FEW_TOKENS, _TOKENS, _SHORT, _THREADS = 8, 16, 1024, 256


def _blocks(ratio: int, arch: str) -> int:
    """Blocks that share a head of keys."""
    return ratio * DIM // _COLUMNS if driver.since_hopper(arch) else 1


@functools.cache
def _spec(dtype: torch.dtype, by_heads: bool, ratio: int, arch: str) -> KernelSpec:
    blocks = _blocks(ratio, arch)
    sizes = {"blocks": blocks, "columns": _COLUMNS if blocks > 1 else DIM, "warps": _WARPS}
    return _of_heads("gated_delta.cu", dtype, by_heads, ratio, taps=_TAPS, **sizes)


@functools.cache
def _inputs_spec(dtype: torch.dtype, by_heads: bool, ratio: int, tokens: int) -> KernelSpec:
    return _of_heads("gated_delta_inputs.cu", dtype, by_heads, ratio, taps=_TAPS, tokens=tokens)


@functools.cache
def _output_spec(dtype: torch.dtype, by_heads: bool, ratio: int) -> KernelSpec:
    return _of_heads("gated_delta_output.cu", dtype, by_heads, ratio)


def _of_heads(source: str, dtype: torch.dtype, by_heads: bool, ratio: int, **sizes: int) -> KernelSpec:
    return KernelSpec.make(source, bf16=dtype == torch.bfloat16, by_heads=by_heads, heads=ratio, **sizes)


def specs(arch: str, layouts: Iterable[tuple[bool, float]] | None = None) -> list[KernelSpec]:
    """Every kernel of this module, for an architecture such as "90a".

    Args:
        arch: the architecture.
        layouts: only those of layers whose projections are by heads of keys, or not, and which have so many
            heads of values to one of those.
    """
    known = [(by_heads, ratio) for by_heads, ratios in _RATIOS.items() for ratio in ratios]
    chosen = known if layouts is None else [layout for layout in known if layout in set(layouts)]
    kinds = [(dtype, *layout) for dtype in operands.DTYPES for layout in chosen]
    steps = [_spec(*kind, arch) for kind in kinds if takes_steps(kind[2], arch)]
    inputs = [_inputs_spec(*kind, tokens) for kind in kinds for tokens in (_FEW_TOKENS, _TOKENS)]
    return [*steps, *inputs, *(_output_spec(*kind) for kind in kinds)]


def takes(dim: int, taps: int, ratio: float, by_heads: bool) -> bool:
    """Whether the kernels compute heads of `dim` columns, `ratio` of values to one of keys, for prompts."""
    return (dim, taps) == (DIM, _TAPS) and ratio in _RATIOS[by_heads]


def takes_steps(ratio: float, arch: str) -> bool:
    """Whether one computes steps, too: below Hopper one block has all columns of a head of keys."""
    return ratio <= _ALONE or driver.since_hopper(arch)


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
    by_heads: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::gated_delta_step`; the reference where the kernel may not.

    Args:
        projected, gates, window, state, taps, log_decay, bias, norm, eps, by_heads: as in
            `kbit.ops.gated_delta_schemas`.
        out: [B, V * D] of projected's dtype, contiguous.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    batch, v_heads, dim, _ = state.shape
    k_heads = heads_of_keys(projected, state)
    ratio, weights = v_heads // k_heads, (taps, log_decay, bias, norm)
    plain = takes(dim, taps.shape[1], ratio, by_heads) and projected.dtype in operands.DTYPES
    rows = projected.stride(1) == gates.stride(1) == 1
    rows = rows and not (state.data_ptr() % 16 or (window.data_ptr() | taps.data_ptr()) % 8)
    index = projected.device.index
    arch = driver.device_limits(index).arch
    plain = plain and takes_steps(ratio, arch)
    if not (plain and rows and all(tensor.is_contiguous() for tensor in weights)):
        reference.gated_delta_step(projected, gates, window, state, *weights, eps, by_heads, out)
        return
    kernel = launcher.load(_spec(projected.dtype, by_heads, ratio, arch), index, _FORMAT)
    blocks = _blocks(ratio, arch)
    warps = _WARPS if blocks > 1 else ratio * _WARPS
    grid = (batch * k_heads * blocks, 1, 1)
    places = operands.addresses(projected, gates, window, state, *weights, out)
    sizes = projected.stride(0), gates.stride(0), k_heads, bias.dtype == torch.float32, eps
    launcher.launch_on(index, kernel, grid, warps * driver.WARP, (*places, *sizes), pdl=True, cluster=blocks)


def _row_pieces(projected: torch.Tensor) -> int | None:
    """16-byte pieces from a token of [B, T, P] to the next; None if not all are as far from each other."""
    steps = operands.pieces(projected)
    return steps[1] if steps and _is_one_row_of_tokens(projected) else None


def _is_one_row_of_tokens(x: torch.Tensor) -> bool:
    """Whether all tokens of [B, T, ...] are as far from each other, those of two sequences included."""
    return len(x) == 1 or x.stride(0) == x.shape[1] * x.stride(1)


def gated_delta_inputs(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor | None,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    count: torch.Tensor | None,
    by_heads: bool,
    heads: Heads,
    out: tuple[torch.Tensor, ...],
) -> None:
    """`kbit::gated_delta_inputs`; the reference where the kernel may not.

    Args:
        projected, gates, window, taps, log_decay, bias, count, by_heads: as in
            `kbit.ops.gated_delta_schemas`.
        heads: of them.
        out: its results, contiguous, written; none is empty.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    (batch, tokens, _), ratio, dtype = projected.shape, heads.values // heads.keys, projected.dtype
    count = None if count is None else count.contiguous()  # by name: a copy must live until the launch
    given = [tensor for tensor in (taps, log_decay, bias, window) if tensor is not None]
    plain = takes(heads.columns, taps.shape[1], ratio, by_heads) and dtype in operands.DTYPES
    row = _row_pieces(projected)
    rows = gates.stride(2) == 1 and _is_one_row_of_tokens(gates) and not taps.data_ptr() % 8
    of_thread = _FEW_TOKENS if batch * tokens <= _SHORT else _TOKENS
    threads = batch * -(-tokens // of_thread) * (heads.channels // operands.PIECE)
    of_gates = batch * tokens * heads.values
    few = max(threads, of_gates) < 1 << 31 and all(tensor.is_contiguous() for tensor in given)
    if row is None or not (plain and rows and few):
        tensors = projected, gates, window, taps, log_decay, bias, count
        reference.gated_delta_inputs(*tensors, by_heads, heads, out)
        return
    index = projected.device.index
    kernel = launcher.load(_inputs_spec(dtype, by_heads, ratio, of_thread), index, _INPUTS_FORMAT)
    places = operands.addresses(projected, gates, window, taps, log_decay, bias, count, *out)
    blocks, more = -(-threads // _THREADS), -(-of_gates // _THREADS)
    sizes = row, gates.stride(1), batch, tokens, heads.keys, int(bias.dtype == torch.float32), blocks
    grid = (blocks + more, 1, 1)
    launcher.launch_on(index, kernel, grid, _THREADS, (*places, *sizes), pdl=True)


def gated_delta_output(
    x: torch.Tensor,
    projected: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    by_heads: bool,
    heads: Heads,
    out: torch.Tensor,
) -> None:
    """`kbit::gated_delta_output`; the reference where the kernel may not.

    Args:
        x, projected, norm, eps, by_heads: as in `kbit.ops.gated_delta_schemas`.
        heads: of them.
        out: like x, contiguous, written; not empty.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    row, ratio = _row_pieces(projected), heads.values // heads.keys
    plain = takes(heads.columns, _TAPS, ratio, by_heads) and x.dtype in operands.DTYPES
    whole = all(tensor.is_contiguous() and not tensor.data_ptr() % 16 for tensor in (x, norm))
    blocks = -(-x.numel() // (operands.PIECE * _THREADS))
    if row is None or not (plain and whole and blocks < 1 << 31):
        reference.gated_delta_output(x, projected, norm, eps, by_heads, heads, out)
        return
    index = x.device.index
    kernel = launcher.load(_output_spec(x.dtype, by_heads, ratio), index, _OUTPUT_FORMAT)
    args = (*operands.addresses(x, projected, norm, out), x.numel() // heads.columns, row, heads.keys, eps)
    launcher.launch_on(index, kernel, (blocks, 1, 1), _THREADS, args, pdl=True)
