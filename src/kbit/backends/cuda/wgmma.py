"""The prefill kernel for Hopper, csrc/wgmma.cu: which configuration takes a problem, and its launch.

Legality is `arch_refusal` and `candidates`; `plan` estimates which of these is fastest, where
no table of measurements says so (`kbit.backends.cuda.tables`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, launcher, layout, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.tensor_map import activation_map, weight_map
from kbit.format.codebook import SUPPORTED_BITS

ARCH = "90a"
TOKENS = (16, 32, 64, 96, 128, 176, 256)  # a block's, at compile time
GROUPED_TOKENS = (16, 32, 64, 128, 256)
_FORMAT = "QQQQQTTiiiii"
_THREADS = 384
_STEP_COLUMNS = 64
_BLOCK_ROWS = 128
_ROW_TILES = 8
_SHARED_BYTES = 227 * 1024
_MOST_STAGES = 10
# Blocks that split K, and what part of the multiprocessors such clusters can fill: larger ones leave some of
# each group of 16 or 18 multiprocessors idle, and a second wave costs more than the split gains.
_CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.875, 8: 0.75}
_STAGING_BYTES = 256  # a token
_BARRIER_BYTES = 16
_LIST_BYTES = 256 + 16 * (operands.MOST_EXPERTS + 1)


@dataclass(frozen=True)
class Plan:
    """A launch: tokens of a block, blocks, and blocks of a cluster, which split K."""

    tokens: int
    grid: int
    cluster: int


def _fixed_bytes(bits: int, tokens: int, grouped: bool) -> int:
    table = operands.table_bytes(bits, pairs=False)
    return table + min(tokens, 64) * _STAGING_BYTES + (_LIST_BYTES if grouped else 0)


def _stage_bytes(bits: int, tokens: int) -> int:
    return tokens * _STEP_COLUMNS * 2 + _ROW_TILES * 4 * layout.tile_words(bits) + _BARRIER_BYTES


def stages(bits: int, tokens: int, grouped: bool) -> int:
    """Steps in flight: as many as fit."""
    room = _SHARED_BYTES - _fixed_bytes(bits, tokens, grouped)
    return min(_MOST_STAGES, room // _stage_bytes(bits, tokens))


def shared_bytes(bits: int, tokens: int, grouped: bool) -> int:
    """Shared memory of a block; as the constants of wgmma.cu add up."""
    return _fixed_bytes(bits, tokens, grouped) + stages(bits, tokens, grouped) * _stage_bytes(bits, tokens)


def spec(bits: int, dtype: torch.dtype, tokens: int, grouped: bool = False) -> KernelSpec:
    """The kernel of one configuration."""
    return KernelSpec.make(
        "wgmma.cu",
        bits=bits,
        bf16=dtype == torch.bfloat16,
        tokens=tokens,
        stages=stages(bits, tokens, grouped),
        experts=operands.MOST_EXPERTS if grouped else 0,
        table_bytes=operands.table_bytes(bits, pairs=False),
    )


def specs() -> list[KernelSpec]:
    """Every kernel that `plan` and `grouped_plan` may choose."""
    return [
        spec(bits, dtype, tokens, grouped)
        for bits in SUPPORTED_BITS
        for dtype in operands.DTYPES
        for grouped in (False, True)
        for tokens in (GROUPED_TOKENS if grouped else TOKENS)
    ]


def arch_refusal(arch: str) -> str | None:
    """Why the kernel cannot run on an architecture, or None."""
    return None if arch == ARCH else f"it needs a Hopper GPU (sm_90), this is sm_{arch}"


@functools.lru_cache(maxsize=4096)
def plan(
    m: int, out_features: int, in_features: int, bits: int, gated: bool, device: driver.DeviceLimits
) -> Plan:
    """The launch for a legal problem: the cheapest by `_clocks`."""
    costs = candidates(m, out_features, in_features, bits, gated, device)
    return min(costs, key=lambda plan: costs[plan])


def candidates(
    m: int, out_features: int, in_features: int, bits: int, gated: bool, device: driver.DeviceLimits
) -> dict[Plan, float]:
    """Every launch that may take a legal problem, and its estimated clocks, see `_clocks`."""
    rows, block_rows = (out_features // 2, _BLOCK_ROWS // 2) if gated else (out_features, _BLOCK_ROWS)
    row_blocks, steps = -(-rows // block_rows), -(-in_features // _STEP_COLUMNS)
    plans = {}
    for tokens in TOKENS:
        tiles = row_blocks * -(-m // tokens)
        for cluster, share in _CLUSTERS.items():
            if cluster > 1 and not (
                tiles * cluster <= share * device.multiprocessors
                and steps >= 2 * cluster
                and _sums_fit(tokens, bits)
            ):
                continue
            blocks = min(tiles, device.multiprocessors) if cluster == 1 else tiles * cluster
            cost = _clocks(tiles, steps, tokens, cluster, device.multiprocessors)
            plans[Plan(tokens, blocks, cluster)] = cost
    return plans


def plan_of(
    tokens: int,
    cluster: int,
    m: int,
    out_features: int,
    in_features: int,
    bits: int,
    gated: bool,
    device: driver.DeviceLimits,
) -> Plan | None:
    """The launch with so many tokens a block and blocks a cluster; None if it may not take the problem."""
    found = candidates(m, out_features, in_features, bits, gated, device)
    return next((plan for plan in found if (plan.tokens, plan.cluster) == (tokens, cluster)), None)


@functools.lru_cache(maxsize=4096)
def grouped_plan(
    m: int,
    experts: int,
    out_features: int,
    in_features: int,
    gated: bool,
    device: driver.DeviceLimits,
) -> Plan:
    """The launch for several weights, as if m rows were dealt to them evenly."""
    rows, block_rows = (out_features // 2, _BLOCK_ROWS // 2) if gated else (out_features, _BLOCK_ROWS)
    row_blocks, steps = -(-rows // block_rows), -(-in_features // _STEP_COLUMNS)
    each = -(-m // experts)

    def cost(tokens: int) -> float:
        tiles = experts * row_blocks * -(-each // tokens)
        return _clocks(tiles, steps, tokens, 1, device.multiprocessors)

    return Plan(min(GROUPED_TOKENS, key=cost), device.multiprocessors, 1)


def _sums_fit(tokens: int, bits: int) -> bool:
    """Whether a block's float32 sums have room where its activations were."""
    return tokens * _BLOCK_ROWS * 4 <= stages(bits, tokens, False) * tokens * _STEP_COLUMNS * 2


def _clocks(tiles: int, steps: int, tokens: int, cluster: int, multiprocessors: int) -> float:
    """Estimate: steps of 64 columns, bound by shared memory or by the tensor cores; epilogues; cluster sums.

    Fitted to an H200 at 4 bits, 8 layers and 16 to 4096 tokens: the choice is within 5% of the best mostly.
    """
    step = max(280 + 3.06 * tokens, 4 * tokens)
    tile = -(-steps // cluster) * step + 3000 + 20 * tokens
    waves = -(-tiles * cluster // multiprocessors)
    return waves * tile + (2500 + 10 * tokens if cluster > 1 else 0)


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
    chosen: Plan | None = None,
) -> None:
    """Launch the kernel on a legal problem; see `kbit.backends.cuda.products`."""
    bits = codebook.shape[0].bit_length() - 1
    if chosen is None:
        limits = driver.device_limits(x.device.index)
        chosen = plan(x.shape[0], out_features, in_features, bits, silu_and_mul, limits)
    pointers = (codebook.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
    sizes = (out_features, in_features, x.shape[0])
    _launch(chosen, bits, x, tiled, (*pointers, 0), sizes, 0, silu_and_mul)


def grouped_linear(
    x: torch.Tensor,
    tiled: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    out_features: int,
    in_features: int,
    silu_and_mul: bool,
    out: torch.Tensor,
) -> None:
    """Launch the kernel on a legal problem of several weights; see `kbit.backends.cuda.products`."""
    bits, experts = codebook.shape[0].bit_length() - 1, tiled.shape[0]
    limits = driver.device_limits(x.device.index)
    chosen = grouped_plan(x.shape[0], experts, out_features, in_features, silu_and_mul, limits)
    pointers = (codebook.data_ptr(), scale.data_ptr(), 0, out.data_ptr(), offsets.data_ptr())
    sizes = (out_features, in_features, x.shape[0])
    _launch(chosen, bits, x, tiled.flatten(0, 1), pointers, sizes, experts, silu_and_mul)


def _launch(
    chosen: Plan,
    bits: int,
    x: torch.Tensor,
    tiled: torch.Tensor,
    pointers: tuple[int, int, int, int, int],
    sizes: tuple[int, int, int],
    experts: int,
    gated: bool,
) -> None:
    index, grouped = x.device.index, experts > 0
    x = operands.aligned(x)
    weights = weight_map(tiled, _ROW_TILES // 2 if gated else _ROW_TILES)
    activations = activation_map(x, chosen.tokens)
    kernel = launcher.load(spec(bits, x.dtype, chosen.tokens, grouped), index, _FORMAT)
    launcher.launch_on(
        index,
        kernel,
        (chosen.grid, 1, 1),
        _THREADS,
        (*pointers, weights, activations, *sizes, experts, int(gated)),
        smem=shared_bytes(bits, chosen.tokens, grouped),
        pdl=True,
        cluster=chosen.cluster,
    )
