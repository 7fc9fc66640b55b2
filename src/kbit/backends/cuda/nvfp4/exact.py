"""Products with NVFP4 weights in tiles under `exact`: csrc/nvfp4_exact.cu, and `exact_wgmma`.

Bits: `kbit.nvfp4.kernels`. They do not depend on anything that is chosen here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from kbit.backends.cuda import driver, launcher, operands
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import exact_wgmma
from kbit.backends.cuda.nvfp4.products import FINISH, check_token_tiles, finish, padded_operands
from kbit.backends.cuda.weights import ready
from kbit.backends.dtype_codes import DTYPES
from kbit.format import nvfp4_layout
from kbit.format.layout import TILE_COLUMNS, TILE_ROWS

TOKENS = (1, 2, 4, 8, 16, 32)
FEW_TOKENS = 8  # up to which no other kernel is faster
SPLITS = (1, 2, 4, 8)
_FORMAT = "QQQQQQQQQiiiiiifi"
_STAGES = 3
_MANY_TOKENS = 16  # from here on two steps of activations are decoded ahead, below four
_STEP_TILES = 4
_TABLE_BYTES, _BARRIER_BYTES = 128 * 256, 1024
_MOST_WARPS = 16
# Of `plan`, in steps of a warp, fitted to an H200. Warps that keep a multiprocessor busy, with fewer a step
# takes as long; and what it costs that no block of the next launch can start beside a launch's own.
_BUSY_WARPS, _ALONE_STEPS = 10, 10
_SPLIT_STEPS = 10  # of two more launches, for sums of parts of K


@functools.cache
def spec(tokens: int, experts: bool = False) -> KernelSpec:
    """The kernel for so many tokens at a time; experts: for one token of an expert."""
    config = {"tokens": tokens, "experts": experts, "stages": _STAGES, "slots": _slots(tokens)}
    return KernelSpec.make("nvfp4_exact.cu", **config)


def _slots(tokens: int) -> int:
    return 2 if tokens >= _MANY_TOKENS else 4


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [*(spec(tokens) for tokens in TOKENS), spec(1, experts=True)]


@dataclass(frozen=True)
class Plan:
    """A launch.

    Attributes:
        tokens, rows: tokens, and row tiles, of a block; a row tile has a warp in every team.
        teams: that share K in a block.
        splits: blocks that share K.
    """

    tokens: int
    rows: int
    teams: int
    splits: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block; one more warp of a team decodes activations."""
        return self.teams * (self.rows + 1) * driver.WARP

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, as the header of nvfp4_exact.cu says."""
        rings = self.rows * _STAGES * _STEP_TILES * nvfp4_layout.TILE_BYTES
        slots = _slots(self.tokens) * _STEP_TILES * 4 * self.tokens * 20
        return _TABLE_BYTES + _BARRIER_BYTES + self.teams * (rings + slots)


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, columns: int, device: driver.DeviceLimits, tokens: int | None = None) -> Plan:
    """How a problem is dealt to blocks: the plan that leaves the busiest multiprocessor the least to do.

    Args:
        m, n, columns: M, N and K.
        device: its limits.
        tokens: of a block; None leaves the choice.
    """
    tokens = tokens or next((t for t in TOKENS if t >= m), TOKENS[-1])
    row_tiles, token_tiles = -(-n // TILE_ROWS), -(-m // tokens)
    steps = -(-columns // (_STEP_TILES * TILE_COLUMNS))

    def blocks_of(plan: Plan) -> int:
        return -(-row_tiles // plan.rows) * token_tiles * plan.splits

    def cost(plan: Plan) -> tuple[int, int]:
        """Steps of the busiest multiprocessor's warps; and fewer teams where that is the same."""
        blocks, teams = blocks_of(plan), plan.teams
        waves = -(-blocks // device.multiprocessors)
        # Decoding activations is a warp's work, too.
        busy = waves * -(-steps // (teams * plan.splits)) * max(_BUSY_WARPS, (plan.rows + 1) * teams)
        busy += _SPLIT_STEPS if plan.splits > 1 else 0
        fits_twice = plan.shared_bytes <= driver.room(device.shared_bytes, 2)
        small = fits_twice and plan.threads <= _MOST_WARPS * driver.WARP // 2
        alone = not small and 2 * blocks > device.multiprocessors
        return busy + (_ALONE_STEPS if alone else 0), teams

    def competes(plan: Plan) -> bool:
        """Whether it fits, and does not split K where two more launches take longer than that saves."""
        may_split = tokens == TOKENS[-1] and blocks_of(plan) <= device.multiprocessors
        return plan.shared_bytes <= device.shared_bytes and (plan.splits == 1 or may_split)

    sizes = (
        Plan(tokens, rows, teams, splits)
        for rows in range(1, _MOST_WARPS)
        for splits in SPLITS
        for teams in range(1, min(steps // splits, _MOST_WARPS // (rows + 1)) + 1)
    )
    return min(filter(competes, sizes), key=cost)


def takes_wgmma(m: int, columns: int, arch: str) -> bool:
    """Whether `exact_wgmma` multiplies m tokens by a weight of so many columns."""
    return m > FEW_TOKENS and exact_wgmma.refusal(columns, arch) is None


def kernels_of(m: int, n: int, columns: int, device: driver.DeviceLimits) -> list[KernelSpec]:
    """The kernels of a product of m tokens, for `multiply`; columns: K, a multiple of 64."""
    if takes_wgmma(m, columns, device.arch):
        return [exact_wgmma.OPERANDS, exact_wgmma.spec(exact_wgmma.plan(m, n, columns, device).tokens)]
    chosen = plan(m, n, columns, device)
    return [spec(chosen.tokens), *([FINISH] if chosen.splits > 1 else [])]


def multiply(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    tiled: torch.Tensor,
    out_features: int,
    w_scale: float,
    row_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.gemm_tiled`.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: K is larger than 2^20, or there are too many rows.
    """
    a_codes, a_scales = padded_operands(a_codes, a_scales)
    m, columns = a_codes.shape[0], a_codes.shape[-1] * 2
    y = a_codes.new_empty((m, out_features), dtype=out_dtype)
    if y.numel() == 0:
        return y
    if columns == 0:
        return y.zero_()
    device = driver.device_limits(y.device.index)
    if takes_wgmma(m, columns, device.arch):
        exact_wgmma.multiply(a_codes, a_scales, tiled, w_scale, row_scale, y)
        return y
    chosen = plan(m, out_features, columns, device)
    check_token_tiles(m, -(-m // chosen.tokens), chosen.tokens)
    partial = torch.zeros_like(y, dtype=torch.int64) if chosen.splits > 1 else None
    tiled = ready(tiled)  # by name: a copy must live until the launch
    pointers = operands.addresses(a_codes, a_scales, tiled, row_scale, y, partial)
    _launch(chosen, spec(chosen.tokens), (*pointers, 0, 0, 0, 0), y, columns, w_scale)
    if partial is not None:
        finish(partial, row_scale, w_scale, y)
    return y


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
    """`multiply` of few sorted rows and their experts; arguments as in `Kernels.moe_gemm_tiled`.

    Every row reads its expert's weights for itself.

    Args:
        a_codes, a_scales: K is a multiple of 64, addresses of 16.
        rows, bounds, tiled, w_scale, row_scale: as there.
        y: float32, float16 or bfloat16; M, N and K are not 0.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
    """
    columns = a_codes.shape[1] * 2
    chosen = plan(*y.shape, columns, driver.device_limits(y.device.index), 1)
    tiled = ready(tiled)  # by name: a copy must live until the launch
    pointers = operands.addresses(a_codes, a_scales, tiled, row_scale, y, None, rows, bounds, w_scale)
    _launch(chosen, spec(1, experts=True), (*pointers, tiled.shape[0]), y, columns, 0.0)


def _launch(
    chosen: Plan, kernel: KernelSpec, pointers: tuple[int, ...], y: torch.Tensor, columns: int, w_scale: float
) -> None:
    m, n = y.shape
    grid = (-(-n // (TILE_ROWS * chosen.rows)), -(-m // chosen.tokens), chosen.splits)
    launcher.launch_on(
        y.device.index,
        launcher.load(kernel, y.device.index, _FORMAT),
        grid,
        chosen.threads,
        (*pointers, m, n, columns, chosen.rows, chosen.teams, w_scale, DTYPES[y.dtype]),
        smem=chosen.shared_bytes,
        pdl=True,
    )
