"""What `grouped` and `resident` do alike: kernels of rows sorted by expert, a few of an expert at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.weight_shape import WeightShape

TOKENS = (8, 16)  # most tokens of one expert that a compiled kernel takes at a time
FORMAT = "QQQQQQQ" + "i" * 7  # of the arguments that every such kernel begins with
_ROW_BYTES = 128  # of a token's columns of a tile


class Config(Hashable, Protocol):
    """Compile-time choices of a kernel, by which they can be looked up."""

    @property
    def warps(self) -> int:
        """Warps of a block."""

    def spec(self, bits: int, dtype: torch.dtype, tokens: int, symmetric: bool = True) -> KernelSpec:
        """The kernel for these choices; `symmetric`: for codebooks that are, around 0."""


class Plan(Protocol):
    """A launch."""

    @property
    def config(self) -> Config:
        """The kernel's compile-time choices."""

    @property
    def tokens(self) -> int:
        """Tokens of one expert at a time that the kernel is compiled for."""

    @property
    def grid(self) -> int:
        """Blocks."""

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""

    @property
    def own(self) -> tuple[int, ...]:
        """The kernel's own arguments, behind those of `FORMAT`."""


def row_aligned(at: int) -> int:
    """A place in shared memory, or the next one, where rows of activations may begin.

    Their chunks are swapped within 128 bytes of the address; see Activations in grouped_unit.cuh.
    """
    return -(-at // _ROW_BYTES) * _ROW_BYTES


def specs(configs: Callable[[int, int, int], Sequence[Config]], shared_bytes: int) -> list[KernelSpec]:
    """The kernels of all configurations, for a GPU whose blocks may have `shared_bytes` of shared memory.

    `configs` has them for a code width, tokens and those bytes.
    """
    return [
        config.spec(bits, dtype, tokens, symmetric)
        for bits, symmetric in operands.CODES
        for tokens in TOKENS
        for config in configs(bits, tokens, shared_bytes)
        for dtype in operands.DTYPES
    ]


# Cached, because every launch looks its kernel up.
@functools.lru_cache(maxsize=4096)
def kernel_of(
    config: Config, bits: int, dtype: torch.dtype, tokens: int, symmetric: bool = True
) -> KernelSpec:
    """The kernel of a configuration, for up to so many rows of an expert at once."""
    return config.spec(bits, dtype, tokens, symmetric)


def linear(
    plan: Callable[[int, int, WeightShape], Plan | None],
    format: str,
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    source: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
    *more: int,
) -> None:
    """Launch a kernel on a legal problem; see `kbit.backends.cuda.products.grouped_linear_tiled`.

    Args:
        plan: the kernel's, which has one for the problem.
        format: of its arguments: `FORMAT`, then its own.
        x, tiled, codebook, scale, offsets, source, out_features, in_features, silu_and_mul, out: the problem.
        more: arguments of the kernel behind those of the plan.
    """
    index, rows, experts = x.device.index, out.shape[0], tiled.shape[0]
    weight = WeightShape.of(codebook, index, out_features, in_features, silu_and_mul)
    chosen = plan(rows, experts, weight)
    assert chosen is not None
    x = operands.aligned_rows(x)
    x_rows, x_stride = x.shape  # contiguous; the stride of a single row may be anything
    spec = kernel_of(chosen.config, weight.bits, x.dtype, chosen.tokens, weight.symmetric)
    kernel = launcher.load(spec, index, format)
    pointers = operands.addresses(tiled, codebook, scale, x, out, offsets, source)
    sizes = (out_features, in_features, rows, x_stride, x_rows, experts, int(silu_and_mul))
    launcher.launch_on(
        index,
        kernel,
        (chosen.grid, 1, 1),
        chosen.config.warps * driver.WARP,
        (*pointers, *sizes, *chosen.own, *more),
        smem=chosen.shared_bytes,
        pdl=True,
    )
