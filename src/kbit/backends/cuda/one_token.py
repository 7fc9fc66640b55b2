"""A layer of experts for one token by csrc/stream.cu: which it may take, and its two launches.

Nothing is sorted: the rows of the token's experts are read as one weight (gates and ups), and then their
columns as one (down projections), whose sum is weighted. Which weights those are is known with the ids alone,
so nothing is fetched before the kernel in front is done.
"""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, launcher, operands, stream, stream_config

MOST_SLOTS = 32
_WARP = 32


def refusal(
    dtype: torch.dtype, weights_dtype: torch.dtype, intermediate: int, slots: int, arch: str
) -> str | None:
    """Why a layer of experts may not go through `rows` and `columns`, or None."""
    if arch != stream_config.EXPERTS_ARCH:
        return f"it is for sm_{stream_config.EXPERTS_ARCH}, this is sm_{arch}"
    if slots > MOST_SLOTS:
        return f"it takes at most {MOST_SLOTS} experts of a token, got {slots}"
    if weights_dtype not in (dtype, torch.float32):
        return f"weights must be {dtype} or float32, got {weights_dtype}"
    return operands.refusal(dtype, 2 * intermediate, silu_and_mul=True)


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
    shape = (ids.shape[0] * out_features, in_features)
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
    """out = sum over u of weights[u] * (x[u] @ W[ids[u]]^T) of one token, x [U, K], in one launch."""
    sizes = (out_features, in_features, False)
    shape = (out_features, x.shape[0] * -(-in_features // stream.GROUP_COLUMNS) * stream.GROUP_COLUMNS)
    _launch_experts(stream_config.EXPERT_COLUMNS, x, tiled, codebook, scale, ids, weights, sizes, shape, out)


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
    index, bits = x.device.index, codebook.shape[0].bit_length() - 1
    chosen = stream.plan(1, *shape, bits, sizes[2], driver.device_limits(index), experts=experts)
    x = operands.aligned(x)
    spec = chosen.config.spec(bits, x.dtype, 1, experts=experts)
    launcher.launch_on(
        index,
        launcher.load(spec, index, stream.FORMAT),
        (chosen.grid, 1, 1),
        (chosen.workers + 1) * _WARP,
        (
            tiled.data_ptr(),
            codebook.data_ptr(),
            scale.data_ptr(),
            x.data_ptr(),
            0,
            out.data_ptr(),
            *sizes[:2],
            1,
            x.shape[1],
            int(sizes[2]),
            chosen.ring_at,
            chosen.parts_at,
            chosen.totals_at,
            0,
            ids.data_ptr(),
            0 if weights is None else weights.data_ptr(),
            ids.shape[0],
            tiled.shape[0],
            int(ids.dtype == torch.int64),
            int(weights is not None and weights.dtype == torch.float32),
        ),
        smem=chosen.shared_bytes,
        pdl=True,
    )
