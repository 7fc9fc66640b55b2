"""Argument checks of the ops on tiled weights; like `kbit.ops.checks`, the same eager and traced."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kbit.format import layout
from kbit.format.part_checks import check_tiles
from kbit.ops import checks, moe_checks


def tile(packed: torch.Tensor, absmax: torch.Tensor, in_features: int, bits: int) -> None:
    """Check the arguments of `kbit::tile`.

    Raises:
        TypeError: packed is not int32, or the block scales are not E4M4.
        ValueError: shapes or devices do not belong together.
    """
    layout.check_canonical(packed, absmax, bits, in_features, "tile")
    if packed.device != absmax.device:
        raise ValueError(
            f"tile: packed is on {packed.device}, absmax on {absmax.device}. Move them together."
        )


def untile(tiled: torch.Tensor, bits: int, out_features: int, in_features: int) -> None:
    """Check the arguments of `kbit::untile`.

    Raises:
        TypeError: the tiles are not int32.
        ValueError: they are not those of such a weight.
    """
    layout.check_tiled(tiled, bits, out_features, in_features, "untile")


def dequantize_tiled(
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
) -> tuple[int, ...]:
    """Check the arguments of `kbit::dequantize_tiled`.

    Returns:
        The result's shape.

    Raises:
        TypeError, ValueError: see `check_tiles`; also a dtype that is not float.
    """
    check_tiles(tiled, codebook, scale, out_features, in_features)
    checks.float_dtype("dequantize", "dtype", dtype)
    return *tiled.shape[:-3], out_features, in_features


def linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool = False,
) -> tuple[int, ...]:
    """Check the arguments of `kbit::linear_tiled`.

    Returns:
        The result's shape.

    Raises:
        TypeError, ValueError: see `check_tiles` and `kbit.ops.checks.linear_inputs`.
    """
    check_tiles(tiled, codebook, scale, out_features, in_features)
    shape = (*tiled.shape[:-3], out_features, in_features)
    checks.linear_inputs(x, shape, tiled.device, bias, silu_and_mul)
    return *x.shape[:-1], out_features // 2 if silu_and_mul else out_features


def merged_linear_tiled(
    x: torch.Tensor,
    tiled: Sequence[torch.Tensor],
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: Sequence[torch.Tensor],
    out_features: Sequence[int],
    in_features: int,
    silu_and_mul: bool = False,
) -> tuple[int, ...]:
    """Check the arguments of `kbit::merged_linear_tiled`.

    Returns:
        The result's shape.

    Raises:
        TypeError, ValueError: see `linear_tiled`; also no weight, more or fewer sizes or biases than weights,
            or, for silu_and_mul, others than two of one size.
    """
    if not tiled or len(tiled) != len(out_features) or len(bias) not in (0, len(tiled)):
        raise ValueError(
            f"linear: merged are one weight or more, each of so many rows and all with a bias or none, got "
            f"{len(tiled)}, the sizes {list(out_features)} and {len(bias)} biases. Pass those of each."
        )
    if silu_and_mul and (len(tiled) != 2 or out_features[0] != out_features[1]):
        raise ValueError(
            f"linear: silu_and_mul takes gate and up of one size, got {list(out_features)}. Merge only those."
        )
    biases: Sequence[torch.Tensor | None] = bias or [None] * len(tiled)
    for one, rows, added in zip(tiled, out_features, biases, strict=True):
        linear_tiled(x, one, codebook, scale, added, rows, in_features)
    return *x.shape[:-1], out_features[0] if silu_and_mul else sum(out_features)


def grouped_linear_tiled(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    out_features: int,
    in_features: int,
    silu_and_mul: bool = False,
    source: torch.Tensor | None = None,
) -> tuple[int, int]:
    """Check the arguments of `kbit::grouped_linear_tiled`.

    Returns:
        The result's shape.

    Raises:
        TypeError, ValueError: see `check_tiles` and `kbit.ops.checks.grouped_inputs`; `source` is not int32
            [R] on x's device.
    """
    check_tiles(tiled, codebook, scale, out_features, in_features)
    shape = (*tiled.shape[:-3], out_features, in_features)
    checks.grouped_inputs(x, shape, tiled.device, expert_offsets, silu_and_mul)
    columns = out_features // 2 if silu_and_mul else out_features
    if source is None:
        return x.shape[0], columns
    if source.dtype != torch.int32:
        raise TypeError(f"grouped_linear: source must be int32, got {source.dtype}. Use moe_align's.")
    if source.dim() != 1 or source.device != x.device:
        raise ValueError(
            f"grouped_linear: source must be [rows] on {x.device}, got {tuple(source.shape)} on "
            f"{source.device}. It names a row of x for every sorted row."
        )
    return source.shape[0], columns


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
) -> None:
    """Check the arguments of `kbit::experts_tiled`.

    Raises:
        TypeError, ValueError: see `check_tiles`, `kbit.ops.moe_checks.moe_align` and `routing`; x has not
            two dimensions, weights are not of as many experts, or an argument is on another device.
    """
    if x.dim() != 2:
        raise ValueError(f"experts: tokens are [T, hidden], got {tuple(x.shape)}. Flatten what is in front.")
    if gate_up.dim() != 4 or down.dim() != 4 or gate_up.shape[0] != down.shape[0]:
        raise ValueError(
            f"experts: gate_up and down must be tiles of as many experts, got {tuple(gate_up.shape)} and "
            f"{tuple(down.shape)}. Are they of one layer?"
        )
    check_tiles(gate_up, codebook, gate_up_scale, 2 * intermediate, x.shape[1])
    check_tiles(down, codebook, down_scale, x.shape[1], intermediate)
    _routed(x, gate_up, down, ids, weights)


def _routed(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> None:
    """Check tokens and choices of experts whose tiles are legal."""
    moe_checks.moe_align(ids, gate_up.shape[0])
    moe_checks.routing(x, ids, weights)
    checks.float_dtype("experts", "x", x.dtype)
    checks.float_dtype("experts", "weights", weights.dtype)
    for name, tensor in (("gate_up", gate_up), ("down", down), ("ids", ids), ("weights", weights)):
        if tensor.device != x.device:
            raise ValueError(f"experts: {name} is on {tensor.device}, x on {x.device}. Move them together.")


def experts_with_shared(
    x: torch.Tensor,
    gate_up: Sequence[torch.Tensor],
    down: Sequence[torch.Tensor],
    codebook: torch.Tensor,
    scale: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    intermediate: int,
) -> None:
    """Check the arguments of `kbit::experts_with_shared`.

    Raises:
        TypeError, ValueError: see `check_tiles`, `kbit.ops.moe_checks.moe_align` and `routing`; or tiles are
            not those of experts, gate and up, and of experts and one more.
    """
    if [one.dim() for one in gate_up] != [4, 3, 3] or [one.dim() for one in down] != [4, 3]:
        shapes = [tuple(one.shape) for one in (*gate_up, *down)]
        raise ValueError(
            f"experts: gate_up must be the tiles of experts, a gate and an up, down those of experts and one "
            f"more, got {shapes}. Are they of one layer?"
        )
    _routed(x, gate_up[0], down[0], ids, weights)
    if scale.shape != (gate_up[0].shape[0] + 1,):
        raise ValueError(
            f"experts: scale must be [{gate_up[0].shape[0] + 1}], for the shared expert too, got "
            f"{tuple(scale.shape)}."
        )
    of_experts, of_shared, hidden = scale[:-1], scale[-1], x.shape[1]
    check_tiles(gate_up[0], codebook, of_experts, 2 * intermediate, hidden)
    check_tiles(down[0], codebook, of_experts, hidden, intermediate)
    for one in gate_up[1:]:
        check_tiles(one, codebook, of_shared, intermediate, hidden)
    check_tiles(down[1], codebook, of_shared, hidden, intermediate)
