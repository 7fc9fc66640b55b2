"""The kernels around grouped products, csrc/moe_*.cu, and their launches.

Tensors are contiguous, on one CUDA device, and checked by the op layer. Work goes to the current stream of
that device and nothing waits; sizes follow from the inputs' shapes, so CUDA graphs record it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.dtype_codes import DTYPES
from kbit.backends.reference import moe as reference
from kbit.ops.moe_checks import SHARED

_ROUTE_FORMAT, _ALIGN_FORMAT, _COMBINE_FORMAT = "QQQQiiiiiif", "QQQQQiiiiii", "QQQQQiiii"
_MAX_THREADS = 1024
# Up to so many ids one block sorts them all, in one launch.
MAX_ALONE = 4096
_PER_BLOCK, _MAX_BLOCKS = 2048, 128
_TABLE_WORDS = 48 * 1024 // 4 - 32  # what a block has without asking for more, sums of 32 warps aside
# Beyond, not even one warp's counts fit, and torch sorts.
MAX_EXPERTS = _TABLE_WORDS - 1
_WHOLE, _COUNT, _PLACE = 0, 1, 2  # Phase in moe_align.cu
_COMBINE_THREADS = 128
# Warps of a block of moe_route.cu.
_ROUTER_WARPS = 4
# moe_route.cu: warps of a token, experts that a lane of them takes; and choices of a token.
_TEAMS = ((1, 1), (1, 4), (4, 4), (4, 8))
_MAX_ROUTED, _MOST_CHOICES = driver.WARP * _TEAMS[-1][0] * _TEAMS[-1][1], driver.WARP


@functools.cache
def route_spec(dtype: torch.dtype, team: int, per_lane: int) -> KernelSpec:
    """The kernel that chooses among 32 * team * per_lane experts, by logits of a dtype."""
    layout = {"team": team, "per_lane": per_lane, "warps": _ROUTER_WARPS}
    return KernelSpec.make("moe_route.cu", dtype=DTYPES[dtype], **layout)


@functools.cache
def align_spec(dtype: torch.dtype) -> KernelSpec:
    """The kernel that sorts ids of a dtype."""
    return KernelSpec.make("moe_align.cu", wide=dtype == torch.int64)


@functools.cache
def combine_spec(dtype: torch.dtype, vector: bool) -> KernelSpec:
    """The kernel that sums rows of a dtype, 16 bytes or one element at a time."""
    return KernelSpec.make("moe_combine.cu", dtype=DTYPES[dtype], vector=vector)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    combine = [combine_spec(dtype, vector) for dtype in DTYPES for vector in (False, True)]
    route = [route_spec(dtype, *team) for dtype in DTYPES for team in _TEAMS]
    return [*route, align_spec(torch.int32), align_spec(torch.int64), *combine]


def moe_route(
    logits: torch.Tensor,
    scoring: str,
    normalize: bool,
    bias: torch.Tensor | None,
    factor: float,
    shared: str,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Choose every token's experts; see `kbit.ops.moe_schemas`.

    Args:
        logits: [T, E], float32, float16 or bfloat16; [T, E + 1] if a shared expert's weight is a sigmoid.
        scoring, normalize, factor, shared: the op's.
        bias: None, or float32 [E].
        ids: int64 [T, U], written; not empty.
        weights: [T, U] of the logits' dtype, written.
    """
    tokens, index = logits.shape[0], logits.device.index
    experts, choices = logits.shape[1] - (shared == "sigmoid"), ids.shape[1] - bool(shared)
    if experts > _MAX_ROUTED or ids.shape[1] > _MOST_CHOICES:
        reference.moe_route(logits, scoring, normalize, bias, factor, shared, ids, weights)
        return
    team, per_lane = next(each for each in _TEAMS if experts <= driver.WARP * each[0] * each[1])
    kernel = launcher.load(route_spec(logits.dtype, team, per_lane), index, _ROUTE_FORMAT)
    pointers = operands.addresses(logits, bias, ids, weights)
    how = (int(scoring == "sigmoid"), int(normalize), SHARED.index(shared))
    sizes = (tokens, experts, choices, *how)
    per_block = min(tokens, _ROUTER_WARPS // team)
    grid = (-(-tokens // per_block), 1, 1)
    threads = per_block * team * driver.WARP
    launcher.launch_on(index, kernel, grid, threads, (*pointers, *sizes, factor), pdl=True)


@dataclass(frozen=True)
class AlignPlan:
    """A launch of moe_align.cu, or two: blocks, their threads, warps that sort, ids of a block."""

    blocks: int
    threads: int
    sorters: int
    per_block: int
    shared_bytes: int


@functools.lru_cache(maxsize=4096)
def align_plan(count: int, experts: int) -> AlignPlan:
    """How so many ids of 1 to `MAX_EXPERTS` experts are sorted."""
    blocks = 1 if count <= MAX_ALONE else min(_MAX_BLOCKS, -(-count // _PER_BLOCK))
    per_block = max(driver.WARP, -(-count // (blocks * driver.WARP)) * driver.WARP)
    blocks = max(1, -(-count // per_block))
    keys = experts + 1
    sorters = min(_MAX_THREADS // driver.WARP, _TABLE_WORDS // keys, per_block // driver.WARP)
    threads = min(_MAX_THREADS, max(sorters, -(-keys // driver.WARP)) * driver.WARP)
    return AlignPlan(blocks, threads, sorters, per_block, 4 * (sorters * keys + 32))


def moe_align(ids: torch.Tensor, source: torch.Tensor, bounds: torch.Tensor, inverse: torch.Tensor) -> None:
    """Sort choices by expert; see `kbit.ops.moe_schemas`.

    Args:
        ids: int32 or int64 [T, U].
        source: int32 [T * U], written.
        bounds: int32 [E + 1], written.
        inverse: int32 [T, U], written.
    """
    experts, device = bounds.shape[0] - 1, ids.device
    if experts > MAX_EXPERTS:
        reference.moe_align(ids, source, bounds, inverse)
        return
    plan = align_plan(ids.numel(), experts)
    kernel = launcher.load(align_spec(ids.dtype), device.index, _ALIGN_FORMAT)
    counts: torch.Tensor | None = None
    phases: tuple[int, ...] = (_WHOLE,)
    if plan.blocks > 1:
        counts, phases = ids.new_empty((plan.blocks, experts + 1), dtype=torch.int32), (_COUNT, _PLACE)
    pointers = operands.addresses(ids, source, bounds, inverse, counts)
    sizes = (ids.numel(), max(1, ids.shape[1]), experts, plan.sorters, plan.per_block)
    for phase in phases:
        args = (*pointers, *sizes, phase)
        grid = (plan.blocks, 1, 1)
        launcher.launch_on(device.index, kernel, grid, plan.threads, args, smem=plan.shared_bytes, pdl=True)


def moe_combine(
    y: torch.Tensor,
    inverse: torch.Tensor,
    weights: torch.Tensor,
    bounds: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Sum every token's rows; see `kbit.ops.moe_schemas`.

    Args:
        y: [R, H], float32, float16 or bfloat16.
        inverse: int32 [T, U].
        weights: [T, U], float32, float16 or bfloat16.
        bounds: None, or int32 [E + 1]: rows from the last of them on are not read.
        out: [T, H] of y's dtype, written; not empty.
    """
    (rows, columns), index = y.shape, y.device.index
    per_piece = 16 // y.element_size()
    vector = columns % per_piece == 0 and y.data_ptr() % 16 == 0 and out.data_ptr() % 16 == 0
    blocks = -(-columns // (_COMBINE_THREADS * (per_piece if vector else 1)))
    if blocks > driver.MAX_GRID_Y:
        reference.moe_combine(y, inverse, weights, bounds, out)
        return
    end = 0 if bounds is None else bounds.data_ptr() + 4 * (bounds.shape[0] - 1)
    pointers = (y.data_ptr(), inverse.data_ptr(), weights.data_ptr(), end, out.data_ptr())
    sizes = (rows, columns, inverse.shape[1], DTYPES[weights.dtype])
    kernel = launcher.load(combine_spec(y.dtype, vector), index, _COMBINE_FORMAT)
    grid = (out.shape[0], blocks, 1)
    launcher.launch_on(index, kernel, grid, _COMBINE_THREADS, (*pointers, *sizes), pdl=True)
