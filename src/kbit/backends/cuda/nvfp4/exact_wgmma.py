"""Products with NVFP4 weights in tiles under `exact` on Hopper, of many tokens: csrc/nvfp4_exact_wgmma.cu.

Bits: `kbit.nvfp4.kernels`. They do not depend on anything that is chosen here.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kbit.backends.cuda import driver, launcher, operands, wgmma, wgmma_config, wgmma_estimate
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4.constants import CODEBOOK, constant
from kbit.backends.cuda.nvfp4.launch import SUB_BLOCK
from kbit.backends.cuda.tensor_map import activation_map, weight_map
from kbit.backends.cuda.weights import ready
from kbit.backends.dtype_codes import DTYPES
from kbit.format import nvfp4_layout, nvfp4_marks
from kbit.format.layout import TILE_COLUMNS, TILE_ROWS

TOKENS = (16, 32, 64)  # of a block
ROWS = wgmma_config.ROWS  # of a block
WINDOW = nvfp4_marks.WIDE_COLUMNS  # whose products are chained
MOST_COLUMNS = 511 * TILE_COLUMNS  # more could overflow the kernel's sums
OPERANDS = KernelSpec("nvfp4_exact_x.cu")
_FORMAT = "QQQQQQQTTiiiiiiiiifi"
_OPERANDS_FORMAT = "QQQQQiii"
_BOUND_TOKENS, _OPERAND_COLUMNS, _OPERAND_THREADS = 32, 256, 512
_THREADS = 384  # a warpgroup copies, two multiply
_SUM_BYTES = 8


class Plan(NamedTuple):
    """A launch.

    Attributes:
        tokens: of a block.
        cluster: blocks that split K.
        grid: blocks in all.
    """

    tokens: int
    cluster: int
    grid: int


def refusal(columns: int, arch: str, experts: int = 0) -> str | None:
    """Why the kernel may not multiply weights of so many columns on an architecture, or None."""
    if columns > MOST_COLUMNS:
        return f"it takes up to {MOST_COLUMNS} columns, got {columns}"
    if experts > operands.MOST_EXPERTS:
        return f"it lists up to {operands.MOST_EXPERTS} experts, got {experts}"
    return wgmma.arch_refusal(arch)


def _step_columns(tokens: int) -> int:
    """Columns of a step: two tiles, where decoding has more latency than products hide, or one."""
    return (2 if tokens < TOKENS[-1] else 1) * TILE_COLUMNS


def _stage_bytes(tokens: int) -> int:
    words = operands.tile_words(nvfp4_layout.BITS, nvfp4=True)
    return wgmma_config.stage_bytes(tokens, ROWS, _step_columns(tokens), words)


def _fixed_bytes(tokens: int) -> int:
    return operands.TABLE_BYTES + ROWS * tokens * _SUM_BYTES + wgmma_config.SCRATCH_BYTES


def _stages(tokens: int) -> int:
    return min(
        wgmma_config.MOST_STAGES, (wgmma_config.SHARED_BYTES - _fixed_bytes(tokens)) // _stage_bytes(tokens)
    )


def shared_bytes(tokens: int, grouped: bool = False) -> int:
    """Shared memory of a block, which the constants of wgmma.cuh are checked against."""
    unused = 0 if grouped else wgmma_config.SCRATCH_BYTES
    return _fixed_bytes(tokens) + _stages(tokens) * _stage_bytes(tokens) - unused


@functools.cache
def spec(tokens: int, grouped: bool = False) -> KernelSpec:
    """The kernel of blocks of so many tokens; grouped: of experts."""
    return KernelSpec.make(
        "nvfp4_exact_wgmma.cu",
        bits=nvfp4_layout.BITS,
        bf16=False,
        tokens=tokens,
        rows=ROWS,
        multicast=False,
        teams=1,
        apart=False,
        columns=_step_columns(tokens),
        stages=_stages(tokens),
        round=2 * tokens,  # staging holds sums
        sums=0,
        experts=operands.MOST_EXPERTS if grouped else 0,
        list_bytes=wgmma_config.list_bytes(nvfp4_layout.BITS, grouped),
        scratch_bytes=wgmma_config.SCRATCH_BYTES,
        shared_bytes=shared_bytes(tokens, grouped),
        **operands.nvfp4_config(True),
    )


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [OPERANDS, *(spec(tokens, grouped) for tokens in TOKENS for grouped in (False, True))]


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, columns: int, device: driver.DeviceLimits) -> Plan:
    """How a problem is dealt to blocks: the cheapest of `candidates`."""
    costs = candidates(m, n, columns, device)
    return min(costs, key=lambda plan: costs[plan])


def candidates(m: int, n: int, columns: int, device: driver.DeviceLimits) -> dict[Plan, float]:
    """Every launch that can take a problem, with its estimated clocks; see `_clocks`."""
    windows, row_blocks = -(-columns // WINDOW), -(-n // ROWS)
    costs = {}
    for tokens in TOKENS:
        tiles = row_blocks * -(-m // tokens)
        for cluster in driver.CLUSTER_SHARES:
            grid = cluster * max(1, min(tiles, device.clusters(cluster)))
            splits = cluster == 1 or wgmma_estimate.alone(tiles, grid, cluster) < tiles
            if windows >= cluster and splits:
                chosen = Plan(tokens, cluster, grid)
                costs[chosen] = _clocks(tiles, windows, chosen)
    return costs


def _window_clocks(tokens: int) -> int:
    return 1170 + 24 * tokens


def _clocks(tiles: int, windows: int, chosen: Plan) -> float:
    """Estimated clocks: windows of K, ends of tiles, sums of clusters.

    Fitted to an H200, 7 layers by 9 to 512 tokens: the choice takes 0.2% longer than the best on average.
    """
    tokens, cluster = chosen.tokens, chosen.cluster
    window, end = _window_clocks(tokens), 1400 + 42 * tokens
    alone = wgmma_estimate.alone(tiles, chosen.grid, cluster)
    clocks = -(-alone // chosen.grid) * (windows * window + end)
    if alone < tiles:
        part = -(-windows // cluster) * window + end + 4000 + 50 * cluster
        clocks += -(-(tiles - alone) // (chosen.grid // cluster)) * part
    return clocks


def grouped_tokens(count: int, experts: int) -> int:
    """Tokens of a block for `count` rows that nobody knows the experts of: the fastest if they lie evenly.

    Of an expert's last tile half is empty on average.
    """
    each = count / experts
    return min(TOKENS, key=lambda tokens: _window_clocks(tokens) * max(1.0, each / tokens + 0.5))


def multiply(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    tiled: torch.Tensor,
    w_scale: float,
    row_scale: torch.Tensor | None,
    y: torch.Tensor,
    chosen: Plan | None = None,
) -> None:
    """y [M, N] = the product; what is not refused, arguments as in `exact.multiply`.

    Args:
        a_codes, a_scales: K is a multiple of 64, addresses of 16.
        tiled, w_scale, row_scale: as there.
        y: float32, float16 or bfloat16; M, N and K are not 0.
        chosen: the launch; None leaves the choice to `plan`.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    device = driver.device_limits(y.device.index)
    chosen = plan(*y.shape, a_codes.shape[1] * 2, device) if chosen is None else chosen
    pointers = operands.addresses(row_scale, None, None, None, y)
    _launch(chosen, a_codes, a_scales, None, tiled, pointers, y, w_scale, 0)


def multiply_experts(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    rows: torch.Tensor | None,
    bounds: torch.Tensor,
    tiled: torch.Tensor,
    w_scale: torch.Tensor,
    row_scale: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """`multiply` of sorted rows and their experts; arguments as in `Kernels.moe_gemm_tiled`.

    Raises:
        KbitError: a kernel cannot be compiled or loaded.
    """
    experts = tiled.shape[0]
    blocks = driver.device_limits(y.device.index).multiprocessors
    chosen = Plan(grouped_tokens(y.shape[0], experts), 1, blocks)
    pointers = operands.addresses(row_scale, rows, w_scale, bounds, y)
    _launch(chosen, a_codes, a_scales, rows, tiled.flatten(0, 1), pointers, y, 0.0, experts)


def _launch(
    chosen: Plan,
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    rows: torch.Tensor | None,
    tiled: torch.Tensor,
    pointers: tuple[int, ...],
    y: torch.Tensor,
    w_scale: float,
    experts: int,
) -> None:
    (m, n), columns, tokens, index = y.shape, a_codes.shape[1] * 2, chosen.tokens, y.device.index
    x, norms = _operands(a_codes, a_scales, rows, m)
    row_blocks, token_blocks = -(-n // ROWS), -(-m // tokens)
    alone = wgmma_estimate.alone(row_blocks * token_blocks, chosen.grid, chosen.cluster)
    near = wgmma.near(columns, tokens, token_blocks)
    tiles = (columns // TILE_COLUMNS, -(-n // TILE_ROWS))
    sizes = (n, m, experts, *tiles, row_blocks, token_blocks, alone, near, w_scale, DTYPES[y.dtype])
    tiled = ready(tiled)  # by name: a copy must live until the launch
    maps = weight_map(tiled.view(torch.int32), ROWS // TILE_ROWS), activation_map(x, tokens)
    before = operands.addresses(constant(CODEBOOK, y.device), norms)
    launcher.launch_on(
        index,
        launcher.load(spec(tokens, experts > 0), index, _FORMAT),
        (chosen.grid, 1, 1),
        _THREADS,
        (*before, *pointers, *maps, *sizes),
        smem=shared_bytes(tokens, experts > 0),
        pdl=True,
        cluster=chosen.cluster,
    )


def _operands(
    a_codes: torch.Tensor, a_scales: torch.Tensor, rows: torch.Tensor | None, m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x float16 [M, K] and bounds int32 [ceil(M / 32), K / 64] of the kernel."""
    columns, token_blocks = a_scales.shape[1] * SUB_BLOCK, -(-m // _BOUND_TOKENS)
    x = a_codes.new_empty((m, columns), dtype=torch.float16)
    norms = a_codes.new_empty((token_blocks, columns // TILE_COLUMNS), dtype=torch.int32)
    grid = (token_blocks * -(-columns // _OPERAND_COLUMNS), 1, 1)
    kernel = launcher.load(OPERANDS, x.device.index, _OPERANDS_FORMAT)
    pointers = operands.addresses(a_codes, a_scales, rows, x, norms)
    sizes = (m, a_codes.shape[0], columns)
    launcher.launch_on(x.device.index, kernel, grid, _OPERAND_THREADS, (*pointers, *sizes), pdl=True)
    return x, norms
