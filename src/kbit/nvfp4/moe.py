"""Mixture of experts: sorting, the four ways to quantize activations for experts, the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kbit.format import type_checks
from kbit.format.words import at
from kbit.nvfp4.formats import NVFP4Tensor
from kbit.nvfp4.kernels import kernels_for
from kbit.nvfp4.quantize import check_input, quantize_nvfp4
from kbit.ops import checks

DEDUP = ("off", "gather", "scatter", "indirect")


@dataclass(frozen=True, eq=False)
class Routing:
    """Where each (token, choice) pair stands once sorted by expert; see `moe_align`."""

    source: torch.Tensor
    slots: torch.Tensor
    bounds: torch.Tensor
    inverse: torch.Tensor


@dataclass(frozen=True, eq=False)
class ExpertInput:
    """Quantized activations for experts.

    Attributes:
        tensor: [R, K] in sorted order, or [T, K] in token order with `rows`.
        rows: int32 [R], the row of `tensor` for each sorted row; None if it is the same.
        quantized_rows: rows that went through the quantizer.
        copied_rows: rows that were copied or stored again.
    """

    tensor: NVFP4Tensor
    rows: torch.Tensor | None
    quantized_rows: int
    copied_rows: int


def moe_align(
    ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, choice) pairs by expert, stably.

    Args:
        ids: int32 or int64 [T, U]: the experts of each token. num_experts means "not mine" and sorts last.
        num_experts: E.

    Returns:
        source: int32 [T * U], the token of each sorted row.
        slots: int32 [T * U], its place t * U + u in ids.
        bounds: int32 [E + 1]: expert e has the sorted rows bounds[e] .. bounds[e + 1] - 1.
        inverse: int32 [T, U], the sorted row of each pair.

    Raises:
        TypeError: ids are not int32 or int64.
        ValueError: ids are not [T, U], or (on CPU, where looking costs no wait) outside 0..num_experts. On a
            GPU such ids count as "not mine".
    """
    return _align(ids, num_experts)


def _align(
    ids: torch.Tensor, num_experts: int, where: str = "", op: str = "moe_align"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_ids(ids, num_experts, where, op)
    if ids.dtype == torch.int64:
        ids = ids.clamp(-1, num_experts).int()  # what int32 cannot hold stays outside
    return kernels_for(ids).align(ids.contiguous(), num_experts)


def _check_ids(ids: torch.Tensor, num_experts: int, where: str, op: str) -> None:
    type_checks.tensor(op, "ids", ids, where)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"{op}: ids must be int32 or int64, got {ids.dtype}{at(where)}. Convert them with .int()."
        )
    known = isinstance(num_experts, int | torch.SymInt) and 1 <= num_experts < 2**31  # ids are int32
    if ids.dim() != 2 or ids.shape[1] < 1 or not known:
        raise ValueError(
            f"{op}: ids must be [T, U] with U >= 1 and num_experts a whole number in 1..2^31 - 1, got "
            f"{tuple(ids.shape)} and {num_experts!r}{at(where)}. Ids are what a router's topk chooses."
        )
    if ids.device.type == "cpu" and ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high > num_experts:
            raise ValueError(
                f"{op}: ids must be in 0..{num_experts}, got {low}..{high}{at(where)}. {num_experts} "
                f"means an expert of another device."
            )


def route(ids: torch.Tensor, num_experts: int, where: str = "", op: str = "moe_align") -> Routing:
    """`moe_align` as one object; `where` is the name of the layer and `op` who asks, for messages."""
    return Routing(*_align(ids, num_experts, where, op))


def quantize_for_experts(
    x: torch.Tensor,
    routing: Routing,
    dedup: str = "off",
    search: bool = True,
    ties: str = "zero",
    global_scale: float | None = None,
    row_scale: bool = False,
) -> ExpertInput:
    """Quantize the activations that experts read. All ways give the same bytes per sorted row.

    The quantizer has no reduction across blocks of 16, so a token's bytes do not depend on who reads them:
    "off" quantizes the T * U gathered rows; "gather" quantizes T rows and copies bytes; "scatter" quantizes T
    rows and stores each U times; "indirect" quantizes T rows and lets the product read them by token.

    Args:
        x: [T, K], one row per token, or [T, U, K], one per choice (then only "off").
        routing: of T tokens.
        dedup: which way.
        search, ties, global_scale, row_scale: as in `quantize_nvfp4`; "scatter" has no row_scale.

    Raises:
        TypeError, ValueError: the arguments do not fit.
    """
    _check_expert_input(x, routing, dedup, row_scale)
    tokens, choices = routing.inverse.shape
    columns, count = x.shape[-1], tokens * choices
    if dedup == "off":
        gathered = (
            x.index_select(0, routing.source) if x.dim() == 2 else x.reshape(count, columns)[routing.slots]
        )
        t = quantize_nvfp4(gathered, search, ties, row_scale, global_scale)
        return ExpertInput(t, None, count, 0)
    if dedup == "scatter":
        factor = check_input(x, search, ties, global_scale)
        kernels = kernels_for(x, routing=routing.inverse)
        rows = x.detach().contiguous()
        parts = kernels.quantize_scatter(rows, routing.inverse, search, ties == "even", factor)
        stored = torch.tensor(factor, dtype=torch.float32, device="cpu")
        t = NVFP4Tensor(*parts, stored, (count, columns))
        return ExpertInput(t, None, tokens, count)
    t = quantize_nvfp4(x, search, ties, row_scale, global_scale)
    if dedup == "indirect":
        return ExpertInput(t, routing.source, tokens, 0)
    return ExpertInput(gather_rows(t, routing.source), None, tokens, count)


def gather_rows(t: NVFP4Tensor, rows: torch.Tensor) -> NVFP4Tensor:
    """Rows `rows` (int32 [R]) of a matrix, as a matrix [R, K] in layout nv."""
    codes, scales = kernels_for(t.codes, rows=rows).gather_rows(*t.nv(), rows.contiguous())
    row_scale = None if t.row_scale is None else t.row_scale.index_select(0, rows)
    return NVFP4Tensor(codes, scales, t.global_scale, (len(rows), t.shape[1]), row_scale=row_scale)


def _check_expert_input(x: torch.Tensor, routing: Routing, dedup: str, row_scale: bool) -> None:
    type_checks.tensor("moe_gemm_nvfp4", "x", x)
    if dedup not in DEDUP:
        raise ValueError(f"moe_gemm_nvfp4: dedup must be one of {', '.join(DEDUP)}, got {dedup!r}.")
    if dedup == "scatter" and row_scale:
        raise ValueError(
            'moe_gemm_nvfp4: dedup="scatter" stores no row scales, got row_scale=True. Use "gather" or '
            '"indirect".'
        )
    tokens, choices = routing.inverse.shape
    if x.dim() == 3 and dedup != "off":
        raise ValueError(
            f"moe_gemm_nvfp4: x {tuple(x.shape)} has a row of its own for each choice, so nothing is "
            f'quantized twice; use dedup="off", got {dedup!r}.'
        )
    if x.shape[:-1] != (tokens,) and x.shape[:-1] != (tokens, choices):
        raise ValueError(
            f"moe_gemm_nvfp4: x must be [{tokens}, K] or [{tokens}, {choices}, K] for these ids, got "
            f"{tuple(x.shape)}."
        )


def moe_combine(y: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """out[t] = sum over u of y[t, u] * p[t, u], u ascending, in float32, rounded once to y's dtype.

    Args:
        y: [T, U, N].
        p: float32 [T, U].

    Returns:
        y's dtype [T, N].

    Raises:
        TypeError, ValueError: the arguments do not fit.
    """
    type_checks.tensor("moe_combine", "y", y)
    type_checks.tensor("moe_combine", "p", p)
    if y.dim() != 3 or p.shape != y.shape[:2]:
        raise ValueError(
            f"moe_combine: y must be [T, U, N] and p [T, U], got {tuple(y.shape)} and {tuple(p.shape)}. Are "
            f"the weights p those of the same tokens and choices?"
        )
    slots = torch.arange(p.numel(), dtype=torch.int32, device=y.device).view(p.shape)
    return combine_sorted(y.reshape(-1, y.shape[2]), slots, p)


def combine_sorted(y: torch.Tensor, inverse: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`moe_combine` of sorted rows [R, N], without putting them back first; inverse is that of `moe_align`.

    Raises:
        TypeError, ValueError: the arguments do not fit.
    """
    checks.float_dtype("moe_combine", "y", y.dtype)
    if p.dtype != torch.float32:
        raise TypeError(f"moe_combine: p must be float32, got {p.dtype}. Convert it with .float().")
    if p.shape != inverse.shape:
        raise ValueError(
            f"moe_combine: p must be {tuple(inverse.shape)}, got {tuple(p.shape)}. Are they of the same "
            f"tokens and choices?"
        )
    kernels = kernels_for(y, inverse=inverse, p=p)
    return kernels.combine(y.contiguous(), inverse.contiguous(), p.contiguous())
