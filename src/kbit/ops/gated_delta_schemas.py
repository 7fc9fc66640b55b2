"""A token's step of gated delta linear attention as one op: schema, checks, and the fake kernel.

    y = torch.ops.kbit.gated_delta_step(projected, gates, window, state, taps, log_decay, bias, norm, eps)

is what transformers' `Qwen3NextGatedDeltaNet` does for one token between its projections. With H heads of
keys, each of R heads of values, D columns, and C = (2 + R) H D channels (all queries, keys, values):

    projected   [B, H * (2 + 2 R) * D]   of each head of keys: query, key, its values, their gates
    gates       [B, H * 2 R]             of each head of keys: beta of its heads of values, then alpha
    window      [B, C, T], written       projections of the last tokens, the newest last
    state       float32 [B, H R, D, D], written
    taps        [C, T]                   the convolution's weight
    log_decay, bias  [H R]               `A_log` and `dt_bias`; of the others' dtype, or both float32
    norm        [D]                      the weight of the gated RMS norm
    eps                                  of that
    y           [B, H R * D]

What is not said to be float32 is of one dtype. Method: Yang et al. 2024 (arXiv:2412.06464).
"""

from __future__ import annotations

import torch

from kbit.ops import checks, operand_checks
from kbit.ops.schemas import LIBRARY

LAYER = "Qwen3NextGatedDeltaNet"  # transformers' class

LIBRARY.define(
    "gated_delta_step(Tensor projected, Tensor gates, Tensor(a!) window, Tensor(b!) state, Tensor taps, "
    "Tensor log_decay, Tensor bias, Tensor norm, float eps) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def heads_of_keys(projected: torch.Tensor, state: torch.Tensor) -> int:
    """H, of projected and state as `kbit::gated_delta_step` takes them."""
    _, v_heads, dim, _ = state.shape
    return (projected.shape[-1] - 2 * v_heads * dim) // (2 * dim)


def check(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
) -> None:
    """Check the arguments of `kbit::gated_delta_step`.

    Raises:
        TypeError: projected is not float, or another tensor of another dtype.
        ValueError: shapes or devices do not belong together, or window or state is not contiguous.
    """
    dtype, name = projected.dtype, "gated_delta_step"
    checks.float_dtype(name, "projected", dtype)
    if state.dim() != 4 or state.shape[2] != state.shape[3] or 0 in state.shape:
        raise ValueError(f"{name}: state must be [B, V, D, D], none of them 0, got {tuple(state.shape)}.")
    batch, v_heads, dim, _ = state.shape
    k_heads = heads_of_keys(projected, state)
    if k_heads < 1 or v_heads % k_heads:
        raise ValueError(
            f"{name}: {projected.shape[-1]} columns of projected are not those of {v_heads} heads of values, "
            f"{dim} columns each, and of as many heads of keys as divide them."
        )
    channels = 2 * k_heads * dim + v_heads * dim
    wide = torch.float32 if log_decay.dtype == bias.dtype == torch.float32 else dtype
    expected = {
        "projected": (projected, dtype, (batch, 2 * k_heads * dim + 2 * v_heads * dim)),
        "gates": (gates, dtype, (batch, 2 * v_heads)),
        "window": (window, dtype, (batch, channels, *window.shape[2:3])),
        "state": (state, torch.float32, (batch, v_heads, dim, dim)),
        "taps": (taps, dtype, (channels, *window.shape[2:3])),
        "log_decay": (log_decay, wide, (v_heads,)),
        "bias": (bias, wide, (v_heads,)),
        "norm": (norm, dtype, (dim,)),
    }
    operand_checks.operands(name, expected)
    operand_checks.written_in_place(name, window=window, state=state)


def output(projected: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """[B, V * D] of any values."""
    return projected.new_empty(state.shape[0], state.shape[1] * state.shape[3])


@torch.library.register_fake("kbit::gated_delta_step", lib=LIBRARY)
def gated_delta_step(projected, gates, window, state, taps, log_decay, bias, norm, eps):  # noqa: D103
    check(projected, gates, window, state, taps, log_decay, bias, norm)
    return output(projected, state)
