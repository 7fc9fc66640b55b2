"""Gated delta linear attention as ops: schemas, checks, and fake kernels.

    y = torch.ops.kbit.gated_delta_step(
        projected, gates, window, state, taps, log_decay, bias, norm, eps, by_heads
    )

is what layers of `kbit.nn.delta_families` do for one token between their projections. With H heads of
keys, each of R heads of values, D columns, and C = (2 + R) H D channels (all queries, keys, values):

    projected   [B, H * (2 + 2 R) * D]   by heads: of each head of keys query, key, its values, their gates;
                                         otherwise all queries, all keys, all values, all gates
    gates       [B, H * 2 R]             by heads: of each head of keys beta of its heads of values, then
                                         alpha; otherwise all betas, all alphas
    window      [B, C, T], written       projections of the last tokens, the newest last
    state       float32 [B, H R, D, D], written
    taps        [C, T]                   the convolution's weight
    log_decay, bias  [H R]               `A_log` and `dt_bias`; of the others' dtype, or both float32
    norm        [D]                      the weight of the gated RMS norm
    eps                                  of that
    y           [B, H R * D]

Of T tokens at once it is three: what the recurrence takes, the recurrence, and the norm.

    query, key, value, beta, decay, last = torch.ops.kbit.gated_delta_inputs(
        projected, gates, window, taps, log_decay, bias, count, by_heads
    )
    x, state = torch.ops.kbit.gated_delta_rule(query, key, value, beta, decay, before)
    y = torch.ops.kbit.gated_delta_output(x, projected, norm, eps, by_heads)

    projected, gates  likewise, [B, T, ...]
    window            None, or [B, C, taps] as above, which is left as it is
    query, key        [B, T, H, D], convolved, activated, and divided by their lengths
    value             [B, T, H R, D], convolved and activated
    beta              [B, T, H R], its sigmoid
    decay             float32 [B, T, H R], the logarithm of what a state is multiplied by
    last              [B, C, min(T, taps)], of `projected`, what a window is made of
    count             None, or int64 [B], how many of a sequence's T tokens, from the first, are there: those
                      behind have a beta and a decay of 0, which leave a state as it is, and last is of those
                      before
    before            None, which is zeros, or float32 [B, H R, D, D]: the state that is left as it is
    state             likewise, behind the last token
    x, y              [B, T, H R, D]: what the recurrence gives, and its gated norm

What is not said to be float32 is of one dtype. Method: Yang et al. 2024 (arXiv:2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kbit.ops import checks, operand_checks
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "gated_delta_step(Tensor projected, Tensor gates, Tensor(a!) window, Tensor(b!) state, Tensor taps, "
    "Tensor log_decay, Tensor bias, Tensor norm, float eps, bool by_heads=True) -> Tensor",
    tags=TAGS,
)
LIBRARY.define(
    "gated_delta_inputs(Tensor projected, Tensor gates, Tensor? window, Tensor taps, Tensor log_decay, "
    "Tensor bias, Tensor? count=None, bool by_heads=True) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    tags=TAGS,
)
LIBRARY.define(
    "gated_delta_rule(Tensor query, Tensor key, Tensor value, Tensor beta, Tensor decay, "
    "Tensor? before=None) -> (Tensor, Tensor)",
    tags=TAGS,
)
LIBRARY.define(
    "gated_delta_output(Tensor x, Tensor projected, Tensor norm, float eps, bool by_heads=True) -> Tensor",
    tags=TAGS,
)


class Heads(NamedTuple):
    """Sizes of a layer: heads of keys, of values, and columns of each."""

    keys: int
    values: int
    columns: int

    @property
    def channels(self) -> int:
        """Of the convolution: all queries, keys and values."""
        return (2 * self.keys + self.values) * self.columns

    @property
    def projected(self) -> int:
        """Columns of a token's projections: those, and gates."""
        return self.channels + self.values * self.columns


def _heads(name: str, columns: int, v_heads: int, dim: int) -> Heads:
    """Those whose projections have so many columns, but for what the shapes of operands have to say.

    Raises:
        ValueError: no heads of keys have.
    """
    keys = (columns - 2 * v_heads * dim) // (2 * dim) if dim > 0 else 0
    if keys < 1 or v_heads % keys:
        raise ValueError(
            f"{name}: {columns} columns of projected are not those of {v_heads} heads of values, "
            f"{dim} columns each, and of as many heads of keys as divide them."
        )
    return Heads(keys, v_heads, dim)


def heads_of_keys(projected: torch.Tensor, state: torch.Tensor) -> int:
    """H, of projected and state as `kbit::gated_delta_step` takes them."""
    return _heads("gated_delta_step", projected.shape[-1], *state.shape[1:3]).keys


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
    heads = _heads(name, projected.shape[-1], v_heads, dim)
    channels = heads.channels
    wide = torch.float32 if log_decay.dtype == bias.dtype == torch.float32 else dtype
    expected = {
        "projected": (projected, dtype, (batch, heads.projected)),
        "gates": (gates, dtype, (batch, 2 * v_heads)),
        "window": (window, dtype, (batch, channels, *window.shape[2:3])),
        "state": (state, torch.float32, (batch, v_heads, dim, dim)),
        "taps": (taps, dtype, (channels, *window.shape[2:3])),
        "log_decay": (log_decay, wide, (v_heads,)),
        "bias": (bias, wide, (v_heads,)),
        "norm": (norm, dtype, (dim,)),
    }
    operand_checks.operands(name, projected.device, expected)
    operand_checks.written_in_place(name, window=window, state=state)


@torch.library.register_fake("kbit::gated_delta_step", lib=LIBRARY)
def gated_delta_step(  # noqa: D103
    projected, gates, window, state, taps, log_decay, bias, norm, eps, by_heads=True
):
    check(projected, gates, window, state, taps, log_decay, bias, norm)
    return projected.new_empty(state.shape[0], state.shape[1] * state.shape[3])


def check_inputs(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor | None,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    count: torch.Tensor | None,
) -> Heads:
    """Check the arguments of `kbit::gated_delta_inputs`; the layer's heads.

    Raises:
        TypeError: projected is not float, or another tensor of another dtype.
        ValueError: shapes or devices do not belong together.
    """
    dtype, name = projected.dtype, "gated_delta_inputs"
    checks.float_dtype(name, "projected", dtype)
    if projected.dim() != 3 or taps.dim() != 2 or log_decay.dim() != 1:
        shapes = [tuple(tensor.shape) for tensor in (projected, taps, log_decay)]
        raise ValueError(
            f"{name}: projected, taps and log_decay must be [B, T, P], [C, taps], [V], got {shapes}."
        )
    (batch, tokens, columns), v_heads = projected.shape, log_decay.shape[0]
    of_values = columns - taps.shape[0]  # gates are as many
    heads = _heads(name, columns, v_heads, of_values // v_heads if v_heads else 0)
    wide = torch.float32 if log_decay.dtype == bias.dtype == torch.float32 else dtype
    expected = {
        "projected": (projected, dtype, (batch, tokens, heads.projected)),
        "gates": (gates, dtype, (batch, tokens, 2 * v_heads)),
        "taps": (taps, dtype, (heads.channels, *taps.shape[1:])),
        "log_decay": (log_decay, wide, (v_heads,)),
        "bias": (bias, wide, (v_heads,)),
    }
    if window is not None:
        expected["window"] = window, dtype, (batch, *taps.shape)
    if count is not None:
        expected["count"] = count, torch.int64, (batch,)
    operand_checks.operands(name, projected.device, expected)
    return heads


def inputs(projected: torch.Tensor, taps: torch.Tensor, heads: Heads) -> tuple[torch.Tensor, ...]:
    """The results of `kbit::gated_delta_inputs`, of any values."""
    batch, tokens, _ = projected.shape
    of_heads = (batch, tokens, heads.values)
    counts = heads.keys, heads.keys, heads.values
    made = [projected.new_empty(batch, tokens, count, heads.columns) for count in counts]
    beta, decay = projected.new_empty(of_heads), projected.new_empty(of_heads, dtype=torch.float32)
    return (*made, beta, decay, projected.new_empty(batch, heads.channels, min(tokens, taps.shape[1])))


def check_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    before: torch.Tensor | None,
) -> Heads:
    """Check the arguments of `kbit::gated_delta_rule`; the layer's heads.

    Raises:
        TypeError: query is not float, or another tensor of another dtype.
        ValueError: shapes or devices do not belong together.
    """
    dtype, name = query.dtype, "gated_delta_rule"
    checks.float_dtype(name, "query", dtype)
    if query.dim() != 4 or value.dim() != 4 or 0 in query.shape[2:] or value.shape[2] % query.shape[2]:
        raise ValueError(
            f"{name}: query must be [B, T, H, D], neither of the last two 0, and value [B, T, V, D], H "
            f"dividing V, got {tuple(query.shape)} and {tuple(value.shape)}."
        )
    (batch, tokens, k_heads, dim), v_heads = query.shape, value.shape[2]
    expected = {
        "key": (key, dtype, tuple(query.shape)),
        "value": (value, dtype, (batch, tokens, v_heads, dim)),
        "beta": (beta, dtype, (batch, tokens, v_heads)),
        "decay": (decay, torch.float32, (batch, tokens, v_heads)),
    }
    if before is not None:
        expected["before"] = before, torch.float32, (batch, v_heads, dim, dim)
    operand_checks.operands(name, query.device, expected)
    return Heads(k_heads, v_heads, dim)


def behind(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `kbit::gated_delta_rule`, of any values."""
    batch, _, v_heads, dim = value.shape
    state = value.new_empty(batch, v_heads, dim, dim, dtype=torch.float32)
    return torch.empty_like(value, memory_format=torch.contiguous_format), state


def check_output(x: torch.Tensor, projected: torch.Tensor, norm: torch.Tensor) -> Heads:
    """Check the arguments of `kbit::gated_delta_output`; the layer's heads.

    Raises:
        TypeError: x is not float, or another tensor of another dtype.
        ValueError: shapes or devices do not belong together.
    """
    dtype, name = x.dtype, "gated_delta_output"
    checks.float_dtype(name, "x", dtype)
    if x.dim() != 4 or 0 in x.shape[2:]:
        raise ValueError(f"{name}: x must be [B, T, V, D], neither of the last two 0, got {tuple(x.shape)}.")
    batch, tokens, v_heads, dim = x.shape
    heads = _heads(name, projected.shape[-1], v_heads, dim)
    expected = {
        "projected": (projected, dtype, (batch, tokens, heads.projected)),
        "norm": (norm, dtype, (dim,)),
    }
    operand_checks.operands(name, x.device, expected)
    return heads


@torch.library.register_fake("kbit::gated_delta_inputs", lib=LIBRARY)
def gated_delta_inputs(  # noqa: D103
    projected, gates, window, taps, log_decay, bias, count=None, by_heads=True
):
    return inputs(projected, taps, check_inputs(projected, gates, window, taps, log_decay, bias, count))


@torch.library.register_fake("kbit::gated_delta_rule", lib=LIBRARY)
def gated_delta_rule(query, key, value, beta, decay, before=None):  # noqa: D103
    check_rule(query, key, value, beta, decay, before)
    return behind(value)


@torch.library.register_fake("kbit::gated_delta_output", lib=LIBRARY)
def gated_delta_output(x, projected, norm, eps, by_heads=True):  # noqa: D103
    check_output(x, projected, norm)
    return torch.empty_like(x, memory_format=torch.contiguous_format)
