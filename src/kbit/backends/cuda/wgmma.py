"""The prefill kernel for Hopper, csrc/wgmma.cu: which configuration takes a problem, and its launch.

Legality is `refusal`; `plan` chooses among what is legal. The choice follows measurements on an H200.
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
_FORMAT = "QQQQTTiiii"
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


@dataclass(frozen=True)
class Plan:
    """A launch: tokens of a block, blocks, and blocks of a cluster, which split K."""

    tokens: int
    grid: int
    cluster: int


def _fixed_bytes(bits: int, tokens: int) -> int:
    return operands.table_bytes(bits, pairs=False) + min(tokens, 64) * _STAGING_BYTES


def _stage_bytes(bits: int, tokens: int) -> int:
    return tokens * _STEP_COLUMNS * 2 + _ROW_TILES * 4 * layout.tile_words(bits) + _BARRIER_BYTES


def stages(bits: int, tokens: int) -> int:
    """Steps in flight: as many as fit."""
    return min(_MOST_STAGES, (_SHARED_BYTES - _fixed_bytes(bits, tokens)) // _stage_bytes(bits, tokens))


def shared_bytes(bits: int, tokens: int) -> int:
    """Shared memory of a block; as the constants of wgmma.cu add up."""
    return _fixed_bytes(bits, tokens) + stages(bits, tokens) * _stage_bytes(bits, tokens)


def spec(bits: int, dtype: torch.dtype, tokens: int) -> KernelSpec:
    """The kernel of one configuration."""
    return KernelSpec.make(
        "wgmma.cu",
        bits=bits,
        bf16=dtype == torch.bfloat16,
        tokens=tokens,
        stages=stages(bits, tokens),
        table_bytes=operands.table_bytes(bits, pairs=False),
    )


def specs() -> list[KernelSpec]:
    """Every kernel that `plan` may choose."""
    return [
        spec(bits, dtype, tokens) for bits in SUPPORTED_BITS for dtype in operands.DTYPES for tokens in TOKENS
    ]


def refusal(dtype: torch.dtype, arch: str, out_features: int, silu_and_mul: bool) -> str | None:
    """Why the kernel may not take a problem, or None."""
    if arch != ARCH:
        return f"it needs a Hopper GPU (sm_90), this is sm_{arch}"
    return operands.refusal(dtype, out_features, silu_and_mul)


@functools.lru_cache(maxsize=4096)
def plan(
    m: int, out_features: int, in_features: int, bits: int, gated: bool, device: driver.DeviceLimits
) -> Plan:
    """The launch for a legal problem: the cheapest by `_clocks`."""
    rows, block_rows = (out_features // 2, _BLOCK_ROWS // 2) if gated else (out_features, _BLOCK_ROWS)
    row_blocks, steps = -(-rows // block_rows), -(-in_features // _STEP_COLUMNS)
    plans = []
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
            plans.append((cost, Plan(tokens, blocks, cluster)))
    return min(plans, key=lambda plan: plan[0])[1]


def _sums_fit(tokens: int, bits: int) -> bool:
    """Whether a block's float32 sums have room where its activations were."""
    return tokens * _BLOCK_ROWS * 4 <= stages(bits, tokens) * tokens * _STEP_COLUMNS * 2


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
    index = x.device.index
    bits = codebook.shape[0].bit_length() - 1
    if chosen is None:
        limits = driver.device_limits(index)
        chosen = plan(x.shape[0], out_features, in_features, bits, silu_and_mul, limits)
    x = operands.aligned(x)
    pointers = (
        codebook.data_ptr(),
        scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    weights = weight_map(tiled, _ROW_TILES // 2 if silu_and_mul else _ROW_TILES)
    activations = activation_map(x, chosen.tokens)
    kernel = launcher.load(spec(bits, x.dtype, chosen.tokens), index, _FORMAT)
    launcher.launch_on(
        index,
        kernel,
        (chosen.grid, 1, 1),
        _THREADS,
        (*pointers, weights, activations, out_features, in_features, x.shape[0], int(silu_and_mul)),
        smem=shared_bytes(bits, chosen.tokens),
        pdl=True,
        cluster=chosen.cluster,
    )
