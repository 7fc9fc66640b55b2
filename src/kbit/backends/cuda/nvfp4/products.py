"""Products of two NVFP4 matrices: csrc/nvfp4_gemm.cu, its tiles and splits, and cuBLAS for many tokens.

Bits: `kbit.nvfp4.kernels`. Under `exact` and `seq16` they do not depend on anything that is chosen here.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kbit.backends.cuda import driver, launcher
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4.launch import SUB_BLOCK, run_items
from kbit.backends.cuda.nvfp4.rows import dequantize
from kbit.backends.cuda.operands import PIECE, addresses
from kbit.backends.cuda.weights import aligned
from kbit.backends.dtype_codes import DTYPES
from kbit.backends.reference.products import in_whole_steps
from kbit.format import nvfp4_layout

ACCUMULATIONS = {"exact": 0, "seq16": 1, "tc": 2}
TOKENS = (8, 16, 32, 64)
SPLITS = (2, 4, 8)
CUBLAS = "cublas"
# Decoding a weight for cuBLAS moves 20.5 bits a weight, a pass of the kernel over 64 tokens 4.5, but from its
# second pass on it waits for arithmetic.
_CUBLAS_TOKENS = 64
# A tile that is halved where its blocks leave a third of all multiprocessors idle.
_HALVED = 32
_FORMAT = "QQQQQQQQQQiiiifi"
_COLUMN_MULTIPLE = 64
_STEP_COLUMNS = 256
_STAGE_BYTES = 16 * 144  # of a warp: 16 rows of 128 bytes of codes and 16 of scales
_MAX_WARPS = 8  # of a team
_LEAST_WARPS = 4  # of more than 8 tokens: kMinThreads of nvfp4_stage.cuh, which fit in 99 KB
# Split K until each multiprocessor has so many warps: fewer do not keep its memory busy.
_WARPS_PER_SM = 8
FINISH = KernelSpec("nvfp4_finish.cu")


@functools.cache
def gemm_spec(accum: str, tokens: int) -> KernelSpec:
    """The kernel under a contract, for so many tokens at a time."""
    config = {"tokens": tokens, "stages": _stages(accum, tokens), "teams": teams(accum, tokens)}
    return KernelSpec.make("nvfp4_gemm.cu", accum=ACCUMULATIONS[accum], **config)


def specs() -> list[KernelSpec]:
    """Every kernel of this module."""
    return [*(gemm_spec(accum, tokens) for accum in ACCUMULATIONS for tokens in TOKENS), FINISH]


def tiles(accum: str) -> tuple[str, ...]:
    """See `kbit.nvfp4.kernels.Kernels.tiles`: tokens of a tile; splits of K where they change no bit."""
    names = [f"tokens{tokens}" for tokens in TOKENS]
    if accum == "exact":
        names += [f"tokens{tokens}/split{split}" for tokens in TOKENS for split in SPLITS]
    return (*names, CUBLAS) if accum == "tc" else tuple(names)


@dataclass(frozen=True)
class Plan:
    """A launch: tokens of a tile, warps of a team, splits of K among blocks."""

    tokens: int
    warps: int
    split: int
    shared_bytes: int


def teams(accum: str, tokens: int) -> int:
    """Parts of K among a block's warps. Only exact sums may be split; 64 tokens leave too few registers."""
    return 2 if accum == "exact" and tokens < TOKENS[-1] else 1


def _stages(accum: str, tokens: int) -> int:
    """Steps in flight. Two teams keep enough bytes there with 3, and four warps each then fit in 99 KB."""
    return 4 if tokens < TOKENS[-1] and teams(accum, tokens) == 1 else 3


def shared_bytes(accum: str, tokens: int, warps: int) -> int:
    """Shared memory of a block, as the header of nvfp4_gemm.cu says."""
    operands = 16 * tokens * (20 if accum == "exact" else 32)
    return teams(accum, tokens) * (warps * _stages(accum, tokens) * _STAGE_BYTES + 2 * operands)


def takes_cublas(m: int, accum: str) -> bool:
    """Whether cuBLAS multiplies m rows by a weight in the layout nv, both decoded."""
    return accum == "tc" and m > _CUBLAS_TOKENS


def padded(columns: int) -> int:
    """K, as kernels take it."""
    return -(-columns // _COLUMN_MULTIPLE) * _COLUMN_MULTIPLE


def chosen_tokens(m: int) -> int:
    """Tokens of a tile for m rows of experts."""
    return next((tokens for tokens in TOKENS if tokens >= m), TOKENS[-1])


def dense_tokens(m: int, n: int, device: driver.DeviceLimits) -> int:
    """Tokens of a tile for m rows by a weight of n."""
    tokens = chosen_tokens(m)
    idle = device.multiprocessors - -(-n // (16 * _LEAST_WARPS))
    return tokens // 2 if tokens == _HALVED and 3 * idle > device.multiprocessors else tokens


@functools.lru_cache(maxsize=4096)
def plan(
    m: int, n: int, columns: int, accum: str, tokens: int, split: int | None, device: driver.DeviceLimits
) -> Plan:
    """How a dense problem, or one expert's, is cut; `split` None splits K where blocks are few.

    Args:
        m: rows of A, of all experts.
        n: rows of W.
        columns: K.
        accum: the contract.
        tokens: of a tile.
        split: forced splits of K, for `exact`.
        device: its limits.
    """
    row_tiles, token_tiles = -(-n // 16), -(-m // tokens)
    least = 2 if tokens == TOKENS[0] else _LEAST_WARPS
    fits = [w for w in range(least, _MAX_WARPS + 1) if shared_bytes(accum, tokens, w) <= device.shared_bytes]

    def busiest(warps: int) -> tuple[int, int]:
        """Row tiles of the multiprocessor with most, and fewer blocks where that is the same."""
        blocks = -(-row_tiles // warps) * token_tiles
        return -(-blocks // device.multiprocessors) * warps, -warps

    warps = min(fits, key=busiest)
    steps = -(-columns // _STEP_COLUMNS)
    if split is None:
        by_teams = teams(accum, tokens)
        wanted = device.multiprocessors * _WARPS_PER_SM // (row_tiles * token_tiles * by_teams)
        split = max(1, min(wanted, steps // (2 * by_teams), SPLITS[-1])) if accum == "exact" else 1
    return Plan(tokens, warps, min(split, steps), shared_bytes(accum, tokens, warps))


def parse_tile(tile: str) -> tuple[int, int]:
    """Tokens and split that a name of `tiles` stands for, but CUBLAS."""
    tokens, _, split = tile.partition("/")
    return int(tokens.removeprefix("tokens")), int(split.removeprefix("split")) if split else 1


def gemm(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    w_scale: float,
    row_scale: torch.Tensor | None,
    accum: str,
    out_dtype: torch.dtype,
    tile: str | None = None,
) -> torch.Tensor:
    """See `kbit.nvfp4.kernels.Kernels.gemm`.

    Raises:
        KbitError: the kernel cannot be compiled or loaded.
        ValueError: K is larger than 2^20, or there are too many rows.
    """
    m, n = a_codes.shape[0], w_codes.shape[0]
    if accum == "tc" and (tile == CUBLAS or (tile is None and takes_cublas(m, accum))):
        return _cublas(a_codes, a_scales, w_codes, w_scales, w_scale, row_scale, out_dtype)
    operands = padded_operands(a_codes, a_scales, w_codes, w_scales)
    columns = operands[0].shape[-1] * 2
    y = a_codes.new_empty((m, n), dtype=out_dtype)
    if y.numel() == 0:
        return y
    device = driver.device_limits(y.device.index)
    tokens, split = (dense_tokens(m, n, device), None) if tile is None else parse_tile(tile)
    chosen = plan(m, n, columns, accum, tokens, split, device)
    partial = a_codes.new_zeros((m, n), dtype=torch.int64) if chosen.split > 1 else None
    numbers = (m, n, columns, 1, w_scale, DTYPES[out_dtype])
    launch(accum, chosen, -(-m // tokens), operands, None, None, None, row_scale, y, partial, numbers)
    if partial is not None:
        finish(partial, row_scale, w_scale, y)
    return y


def finish(partial: torch.Tensor, row_scale: torch.Tensor | None, w_scale: float, y: torch.Tensor) -> None:
    """y from the exact sums of parts of K, int64 [M, N] in units of 2^-20."""
    args = (*addresses(partial, row_scale, y), y.numel(), y.shape[1], w_scale, DTYPES[y.dtype])
    run_items(FINISH, "QQQQifi", y.device, y.numel(), args)


def launch(
    accum: str,
    chosen: Plan,
    token_tiles: int,
    operands: tuple[torch.Tensor, ...],
    rows: torch.Tensor | None,
    bounds: torch.Tensor | None,
    w_scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    y: torch.Tensor,
    partial: torch.Tensor | None,
    numbers: tuple[int | float, ...],
) -> None:
    """Launch nvfp4_gemm.cu.

    Raises:
        ValueError: more tiles of tokens than a grid has.
    """
    check_token_tiles(y.shape[0], token_tiles, chosen.tokens)
    a_codes, a_scales, w_codes, w_scales = operands
    pointers = addresses(a_codes, a_scales, rows, bounds, w_codes, w_scales, w_scale, row_scale, y, partial)
    kernel = launcher.load(gemm_spec(accum, chosen.tokens), y.device.index, _FORMAT)
    grid = (-(-y.shape[1] // (16 * chosen.warps)), token_tiles, chosen.split)
    threads = chosen.warps * teams(accum, chosen.tokens) * driver.WARP
    args = (*pointers, *numbers)
    launcher.launch_on(y.device.index, kernel, grid, threads, args, smem=chosen.shared_bytes, pdl=True)


def check_token_tiles(rows: int, token_tiles: int, tokens: int) -> None:
    """Raises ValueError where there are more tiles of tokens than a grid has."""
    if token_tiles > driver.MAX_GRID_Y:
        raise ValueError(
            f"nvfp4: {rows} rows are {token_tiles} tiles of {tokens}, at most {driver.MAX_GRID_Y} can be "
            f"launched. Split the rows."
        )


def padded_operands(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Codes and scales, alternately, with K a multiple of 64 (code 0, scale 0) at addresses of 16 bytes.

    Raises:
        ValueError: K is larger than 2^20.
    """
    groups = operands[1].shape[-1]
    nvfp4_layout.check_columns("nvfp4", groups * SUB_BLOCK)
    missing = padded(groups * SUB_BLOCK) // SUB_BLOCK - groups
    if missing:
        operands = tuple(
            F.pad(t, (0, missing * (1 if i % 2 else SUB_BLOCK // 2))) for i, t in enumerate(operands)
        )
    return tuple(aligned(t) for t in operands)


def _cublas(
    a_codes: torch.Tensor,
    a_scales: torch.Tensor,
    w_codes: torch.Tensor,
    w_scales: torch.Tensor,
    w_scale: float,
    row_scale: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Decode both operands, exactly, and multiply; a factor alone is cuBLAS's alpha, applied in float32.

    In bfloat16: without their factor sums go beyond float16, in which cuBLAS may add up parts of K. It does
    so in the result's dtype where rows of the result are not aligned to 16 bytes, so that is float32 then.
    """
    a = dequantize(a_codes, a_scales, 1.0, None, torch.bfloat16)
    w = dequantize(w_codes, w_scales, 1.0, None, torch.bfloat16)
    a, w = in_whole_steps(a, w)
    if out_dtype == torch.bfloat16 and row_scale is None and w.shape[0] % PIECE == 0:
        return a.new_empty((a.shape[0], w.shape[0])).addmm_(a, w.t(), beta=0.0, alpha=w_scale)
    total = torch.mm(a, w.t(), out_dtype=torch.float32).mul_(w_scale)
    return (total if row_scale is None else total.mul_(row_scale[:, None])).to(out_dtype)
