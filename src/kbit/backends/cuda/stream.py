"""The small-batch kernel, csrc/stream.cu: which configuration takes a problem, and its launch.

Legality is `refusal`; `plan` chooses among what is legal. The choice follows measurements on an H200 (132
multiprocessors) and changes speed alone: results depend on the number of tokens' class, N and K.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, launcher, layout, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format.codebook import SUPPORTED_BITS

TOKENS = (1, 8, 16)  # the kernel is compiled for at most so many
_FORMAT = "QQQQQQiiiiiiiiQ"
_GROUP_TILES = 4  # column tiles that a worker takes at a time
_WARP = 32
_BARRIER_BYTES = 1024
_ROW_BYTES = 128  # of 32 sums


@dataclass(frozen=True)
class Config:
    """Compile-time choices of stream.cu.

    Attributes:
        workers: most warps that split K; a launch may have fewer.
        blocks: of which so many are meant to run at once on a multiprocessor.
        stages: groups of four tiles that a worker has in flight.
        pairs: look two 5-bit codes up at once, in a table of 128 KB.
    """

    workers: int
    blocks: int
    stages: int
    pairs: bool = True

    def spec(self, bits: int, dtype: torch.dtype, tokens: int, nvfp4: bool = False) -> KernelSpec:
        """The kernel for this configuration; `nvfp4`: for NVFP4's tiles."""
        return KernelSpec.make(
            "stream.cu",
            bits=bits,
            bf16=dtype == torch.bfloat16,
            pairs=self.pairs,
            tokens=tokens,
            workers=self.workers,
            blocks=self.blocks,
            stages=self.stages,
            buffers=self.buffers(tokens),
            in_holes=self.in_holes(bits, tokens),
            table_bytes=operands.table_bytes(bits, self.pairs),
            **layout.nvfp4_config(nvfp4),
        )

    def buffers(self, tokens: int) -> int:
        """How many row tiles' sums of the workers may wait to be added up."""
        return 4 if self.workers * _sums(tokens) <= 32 else 2

    def in_holes(self, bits: int, tokens: int) -> bool:
        """Whether those sums fit in what the table of 3 and 4 bits leaves free: half of each of 256 rows."""
        return bits in (3, 4) and self.buffers(tokens) * self.workers * _sums(tokens) <= 256


def _sums(tokens: int) -> int:
    """Sums that a lane has of a row tile, in the kernel for so many tokens; as kSums in stream.cuh."""
    return 2 if tokens == 1 else tokens // 2


@dataclass(frozen=True)
class Plan:
    """A launch: configuration, blocks, warps that split K, and places in shared memory."""

    config: Config
    tokens: int
    grid: int
    workers: int
    ring_at: int
    parts_at: int
    totals_at: int
    shared_bytes: int


# Two blocks on a multiprocessor, or one of them beside the next kernel's; many warps for large K; 20 groups
# at once (K = 5120).
_NARROW, _WIDE, _WIDER = Config(8, 2, 2), Config(16, 1, 2), Config(20, 1, 1)
_ROOMY = Config(8, 1, 2)  # more registers: 8 tokens of 5120 x 2048 from 7.0 to 5.7 us


def configs(bits: int, tokens: int, shared_bytes: int, arch: str) -> list[Config]:
    """What a multiprocessor of an architecture, with so much shared memory a block, may be asked to run."""
    if shared_bytes <= operands.SMALL_MEMORY:
        return [Config(8, 1, 1, pairs=bits != 5)]
    if bits == 5:  # a table of pairs leaves room for one stage of many warps
        pairs = shared_bytes > operands.PAIRS_MEMORY
        return [Config(8, 1, 2, pairs), Config(16, 1, 1, pairs)]
    if tokens > 1:
        return [_ROOMY, _WIDE]
    # 21 warps have 80 registers each. Only for sm_90a does that do: for sm_80 and 100a 8 to 56 bytes spill.
    return [_NARROW, _WIDE, _WIDER] if arch == "90a" else [_NARROW, _WIDE]


def specs(shared_bytes: int, arch: str) -> list[KernelSpec]:
    """Every kernel that `plan` may choose on such a multiprocessor."""
    formats = [*((bits, False) for bits in SUPPORTED_BITS), (layout.NVFP4_BITS, True)]
    return [
        config.spec(bits, dtype, tokens, nvfp4)
        for bits, nvfp4 in formats
        for tokens in TOKENS
        for config in configs(bits, tokens, shared_bytes, arch)
        for dtype in operands.DTYPES
    ]


def refusal(m: int, dtype: torch.dtype, out_features: int, silu_and_mul: bool) -> str | None:
    """Why the kernel may not take a problem, or None."""
    if not 1 <= m <= TOKENS[-1]:
        return f"it takes 1 to {TOKENS[-1]} tokens, got {m}"
    return operands.refusal(dtype, out_features, silu_and_mul)


@functools.lru_cache(maxsize=4096)
def plan(
    m: int,
    out_features: int,
    in_features: int,
    bits: int,
    gated: bool,
    device: driver.DeviceLimits,
    nvfp4: bool = False,
) -> Plan:
    """The launch for a legal problem."""
    tokens = next(t for t in TOKENS if t >= m)
    row_tiles, column_tiles, _ = layout.tile_shape(out_features, in_features, bits)
    groups = -(-column_tiles // _GROUP_TILES)
    units = row_tiles // 2 if gated else row_tiles
    available = configs(bits, tokens, device.shared_bytes, device.arch)
    config = _preferred(available, tokens, groups)
    passes = -(-groups // config.workers)
    # All passes are of one size, and the table wants several warps to fill it.
    workers = max(-(-groups // passes), min(8, config.workers))
    crowded = config.blocks == 2 and tokens == 1 and units > config.blocks * device.multiprocessors
    grid = min(units, device.multiprocessors * (2 if crowded else 1))
    tile_bytes = 4 * layout.words_of(bits, nvfp4)
    chosen = _lay_out(config, tokens, grid, workers, units, passes, bits, gated, tile_bytes)
    # Fewer row tiles a block have fewer totals to keep.
    while chosen.shared_bytes > device.shared_bytes and grid < units:
        grid = min(units, 2 * grid)
        chosen = _lay_out(config, tokens, grid, workers, units, passes, bits, gated, tile_bytes)
    return chosen


def _preferred(available: list[Config], tokens: int, groups: int) -> Config:
    narrow, wide = available[0], available[-1]
    if tokens == 1:
        wide = available[min(1, len(available) - 1)] if groups <= 16 or groups > 20 else wide
        return narrow if groups <= 8 else wide
    # Between 17 and 24 groups, three passes of a narrow block keep fewer activations in flight.
    return narrow if groups <= 8 or 16 < groups <= 24 else wide


def _lay_out(
    config: Config,
    tokens: int,
    grid: int,
    workers: int,
    units: int,
    passes: int,
    bits: int,
    gated: bool,
    tile_bytes: int,
) -> Plan:
    """Shared memory: table, barriers, ring, parts, totals; as the header of stream.cu says."""
    sums, rows = _sums(tokens), -(-units // grid)
    ring_at = operands.table_bytes(bits, config.pairs) + _BARRIER_BYTES
    parts_at = ring_at + workers * config.stages * _GROUP_TILES * tile_bytes
    parts = 0 if config.in_holes(bits, tokens) else config.buffers(tokens) * workers * sums * _ROW_BYTES
    totals_at = parts_at + parts
    kept = (2 if gated else 1) * rows * sums * _ROW_BYTES if gated or (passes > 1 and rows > 1) else 0
    return Plan(config, tokens, grid, workers, ring_at, parts_at, totals_at, totals_at + kept)


def linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
    row_scale: torch.Tensor | None = None,
) -> None:
    """Launch the kernel on a legal problem, or one of more tokens, 16 at a time; see `products`.

    NVFP4's tiles are known by their size, and rows of the result may have factors with them: float32 [M].
    """
    most, weight = TOKENS[-1], (tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    if x.shape[0] <= most:
        _launch(x, *weight, out, row_scale)
        return
    for first in range(0, x.shape[0], most):
        part = slice(first, first + most)
        _launch(x[part], *weight, out[part], None if row_scale is None else row_scale[part])


def _launch(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
    row_scale: torch.Tensor | None,
) -> None:
    index = x.device.index
    bits, nvfp4 = codebook.shape[0].bit_length() - 1, layout.is_nvfp4(tiled)
    limits = driver.device_limits(index)
    chosen = plan(x.shape[0], out_features, in_features, bits, silu_and_mul, limits, nvfp4)
    x = operands.aligned(x)
    kernel = launcher.load(chosen.config.spec(bits, x.dtype, chosen.tokens, nvfp4), index, _FORMAT)
    launcher.launch_on(
        index,
        kernel,
        (chosen.grid, 1, 1),
        (chosen.workers + 1) * _WARP,
        (
            tiled.data_ptr(),
            codebook.data_ptr(),
            scale.data_ptr(),
            x.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out_features,
            in_features,
            *x.shape,  # contiguous; the stride of a single row may be anything
            int(silu_and_mul),
            chosen.ring_at,
            chosen.parts_at,
            chosen.totals_at,
            0 if row_scale is None else row_scale.data_ptr(),
        ),
        smem=chosen.shared_bytes,
        pdl=True,
    )
