"""Which kernels layers of NVFP4 will use, to compile them before they are needed.

It asks the same functions that choose and plan launches. What it misses is compiled at its first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, routing, stream, stream_config, wgmma, wgmma_config
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import exact, exact_wgmma, folds, moe, products, rows, tiled
from kbit.backends.cuda.nvfp4.launch import SUB_BLOCK, groups_of
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import nvfp4_layout


class Arithmetic(NamedTuple):
    """How layers compute; see `kbit.nvfp4.layers.NVFP4Settings`.

    Attributes:
        accum: of W4A4; None for activations of 16 bits.
        search, ties_even, row_scale: of the activations' quantizer.
    """

    accum: str | None
    search: bool = True
    ties_even: bool = False
    row_scale: bool = True


def of_linear(
    out_features: int,
    in_features: int,
    how: Arithmetic,
    tokens: Iterable[int],
    dtype: torch.dtype,
    device: driver.DeviceLimits,
) -> list[KernelSpec]:
    """The kernels of a linear layer by so many tokens, each once; only under `seq16` not of tiles."""
    found: dict[KernelSpec, None] = {}
    columns = groups_of(in_features) * SUB_BLOCK
    for m in tokens:
        if how.accum is None:
            found |= dict.fromkeys(_of_16_bits(m, out_features, in_features, dtype, device))
            continue
        found[rows.quantizer(m, columns, dtype, how.search, how.ties_even, how.row_scale)] = None
        if how.accum == "exact":
            kernels = exact.kernels_of(m, out_features, products.padded(columns), device)
            found |= dict.fromkeys(kernels)
        elif how.accum == "tc" and tiled.refusal(m, dtype, device.arch) is None:
            found |= dict.fromkeys(_of_codes(m, out_features, columns, dtype, device))
        else:
            found[_untiled(m, out_features, how.accum, device)] = None
    return list(found)


def _untiled(m: int, n: int, accum: str, device: driver.DeviceLimits) -> KernelSpec:
    if products.takes_cublas(m, accum):
        return rows.dequantize_spec(torch.bfloat16)
    return products.gemm_spec(accum, products.dense_tokens(m, n, device))


def _of_codes(
    m: int, n: int, columns: int, dtype: torch.dtype, device: driver.DeviceLimits
) -> Iterator[KernelSpec]:
    """Of W4A4 under `tc`."""
    if m <= stream_config.CODED_TOKENS and columns % stream.GROUP_COLUMNS == 0:
        yield stream.planned(m, dtype, _weight(n, columns, device), nvfp4=True, coded=True)[1]
        return
    yield rows.dequantize_spec(dtype)
    yield from _of_16_bits(m, n, columns, dtype, device)


def _of_16_bits(
    m: int, n: int, columns: int, dtype: torch.dtype, device: driver.DeviceLimits
) -> Iterator[KernelSpec]:
    weight = _weight(n, columns, device)
    if tiled.refusal(m, dtype, device.arch) is not None:
        yield rows.dequantize_spec(dtype)
    elif tiled.kernel(m, device.arch) == "wgmma":
        yield wgmma.kernel_of(wgmma.plan(m, weight), dtype, weight, nvfp4=True)
    else:
        yield from stream.kernels_of(m, dtype, weight, nvfp4=True)


def _weight(n: int, columns: int, device: driver.DeviceLimits) -> WeightShape:
    return WeightShape(n, columns, nvfp4_layout.BITS, False, device)


def take_tiles(experts: int, columns: Iterable[int], device: torch.device) -> bool:
    """Whether kernels multiply tiles of so many experts, of weights with these numbers of columns."""
    if device.type != "cuda":
        return False
    index = torch.cuda.current_device() if device.index is None else device.index
    return _take_tiles(experts, columns, driver.device_limits(index).arch)


def _take_tiles(experts: int, columns: Iterable[int], arch: str) -> bool:
    return all(moe.tiles_refusal(experts, products.padded(k), arch) is None for k in columns)


def of_experts(
    how: Arithmetic,
    fold: bool,
    experts: int,
    columns: Iterable[int],
    dtype: torch.dtype,
    device: driver.DeviceLimits,
) -> list[KernelSpec]:
    """The kernels of experts by any number of tokens, of which nobody knows how many an expert gets.

    Args:
        how: they compute.
        fold: whether silu(gate) * up is quantized by the kernel that computes it.
        experts: how many.
        columns: K of their weights.
        dtype: of activations.
        device: its limits.
    """
    align = [routing.align_spec(torch.int32), moe.SLOTS]
    combine = [routing.combine_spec(dtype, vector) for vector in (False, True)]
    silu = (
        folds.silu_spec(dtype, how.ties_even, quantize=True) if fold else folds.silu_spec(dtype, False, False)
    )
    takes_tiles = _take_tiles(experts, columns, device.arch)
    if how.accum is None:
        many = [wgmma_config.spec(block, dtype) for block in wgmma_config.nvfp4_grouped_blocks()]
        one_by_one = [rows.dequantize_spec(dtype)]
        return [*align, *combine, silu, *(many if takes_tiles else one_by_one)]
    coded = [*rows.quantizers(dtype, how.search, how.ties_even, how.row_scale), rows.GATHER]
    if how.accum != "seq16" and takes_tiles:
        tokens = exact_wgmma.TOKENS
        many = [exact_wgmma.OPERANDS, *(exact_wgmma.spec(t, grouped=True) for t in tokens)]
        multiply = [exact.spec(1, experts=True), *many]
    else:
        multiply = [products.gemm_spec(how.accum, t) for t in products.TOKENS]
    return [*align, *coded, silu, *multiply, *combine]
