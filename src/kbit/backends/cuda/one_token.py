"""A layer of experts for one token by csrc/stream.cu: which it may take, and its two launches.

Nothing is sorted: the rows of the token's experts are read as one weight (gates and ups), and then their
columns as one (down projections), whose sum is weighted. Which weights those are is known with the ids alone,
so the first launch fetches nothing before the kernel in front is done, and the second one, which must follow
it, begins at once: the first lets it start when the ids are there.
"""

from __future__ import annotations

import functools

import torch

from kbit.backends import environment
from kbit.backends.cuda import operands, stream, stream_config
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import layout

MOST_SLOTS = 32  # a lane of a warp each


def refusal(
    dtype: torch.dtype, weights_dtype: torch.dtype, intermediate: int, slots: int, arch: str
) -> str | None:
    """Why a layer of experts may not go through `rows` and `columns`, or None."""
    if arch != stream_config.MEASURED_ARCH:
        return f"it is for sm_{stream_config.MEASURED_ARCH}, this is sm_{arch}"
    if slots > MOST_SLOTS:
        return f"it takes at most {MOST_SLOTS} experts of a token, got {slots}"
    if weights_dtype not in (dtype, torch.float32):
        return f"weights must be {dtype} or float32, got {weights_dtype}"
    return operands.refusal(dtype, 2 * intermediate, silu_and_mul=True)


def is_chosen(
    dtype: torch.dtype, weights_dtype: torch.dtype, intermediate: int, slots: int, arch: str
) -> bool:
    """Whether it takes a token: it may, and KBIT_KERNEL names no other kernel."""
    named = environment.kernel() in (None, "stream")
    return named and refusal(dtype, weights_dtype, intermediate, slots, arch) is None


def rows(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """out[u] = x @ W[ids[u]]^T (gated: silu(gate) * up) of one token, x [1, K], ids [U], in one launch."""
    sizes = (out_features, in_features, silu_and_mul)
    shape = _stacked(ids.shape[0], out_features, in_features)
    _launch_experts(stream_config.EXPERT_ROWS, x, tiled, codebook, scale, ids, None, sizes, shape, out)


def columns(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out_features: int,
    in_features: int,
    out: torch.Tensor,
) -> None:
    """out = sum over u of weights[u] * (x[u] @ W[ids[u]]^T) of one token, x [U, K], in one launch.

    To be launched right after `rows` with the same ids, which are read before the kernel in front is done.
    """
    sizes = (out_features, in_features, False)
    shape = _side_by_side(x.shape[0], out_features, in_features)
    _launch_experts(stream_config.EXPERT_COLUMNS, x, tiled, codebook, scale, ids, weights, sizes, shape, out)


def _stacked(slots: int, out_features: int, in_features: int) -> tuple[int, int]:
    """N and K of the rows of so many experts as one weight."""
    return slots * -(-out_features // layout.TILE_ROWS) * layout.TILE_ROWS, in_features


def _side_by_side(slots: int, out_features: int, in_features: int) -> tuple[int, int]:
    """N and K of the columns of so many experts as one weight."""
    return out_features, slots * -(-in_features // stream.GROUP_COLUMNS) * stream.GROUP_COLUMNS


def kernel_of(slots: int, dtype: torch.dtype, weight: WeightShape) -> KernelSpec:
    """The kernel of `rows` (gated) or `columns` for a token's `slots` experts, `weight` one's."""
    kind = stream_config.EXPERT_ROWS if weight.gated else stream_config.EXPERT_COLUMNS
    joined = (_stacked if weight.gated else _side_by_side)(slots, weight.out_features, weight.in_features)
    return _planned(kind, dtype, weight._replace(out_features=joined[0], in_features=joined[1]))[1]


def _planned(experts: int, dtype: torch.dtype, weight: WeightShape) -> tuple[stream.Plan, KernelSpec]:
    chosen = stream.plan(1, weight, experts=experts)
    rest = (False, experts, False, weight.symmetric)
    return chosen, stream_config.kernel_of(chosen.config, weight.bits, dtype, 1, *rest)


@functools.lru_cache(maxsize=4096)
def _prepared(
    experts: int,
    device_index: int,
    dtype: torch.dtype,
    weight: WeightShape,
    out_features: int,
    in_features: int,
) -> stream.Prepared:
    """The launch for a weight of the rows, or columns, of all experts of a token; N and K of one of them."""
    chosen, spec = _planned(experts, dtype, weight)
    return stream.prepare(device_index, chosen, spec, 1, out_features, in_features, weight.gated)


def _launch_experts(
    experts: int,
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor | None,
    sizes: tuple[int, int, bool],
    shape: tuple[int, int],
    out: torch.Tensor,
) -> None:
    index, (out_features, in_features, gated) = x.device.index, sizes
    weight = WeightShape.of(codebook, index, *shape, gated)
    one = _prepared(experts, index, x.dtype, weight, out_features, in_features)
    ids_at, weights_at = operands.addresses(ids, weights)
    routing = stream.Routing(
        ids=ids_at,
        weights=weights_at,
        slots=ids.shape[0],
        experts=tiled.shape[0],
        wide_ids=int(ids.dtype == torch.int64),
        wide_weights=int(weights is not None and weights.dtype == torch.float32),
    )
    one.launch(operands.aligned_rows(x), tiled, codebook, scale, None, out, routing=routing)
