"""Grids of the kernels over rows, and their launch."""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, launcher
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format.codebook import BLOCK_SIZE

Grid = tuple[int, int, int]

_TILES = 32  # blocks a warp takes at a time in quantize and dequantize
_MAX_BLOCKS = 2**31 - 1  # of one matrix: their numbers are 32 bits in the kernels
_TILED_PER_SM = 8  # blocks of repack: a few times what runs at once, which evens out the end


def joined(dense: torch.Tensor, columns: int) -> int:
    """1 if blocks of 32 follow one another in `dense`, for copies of 16 bytes."""
    return int(columns % BLOCK_SIZE == 0 and dense.data_ptr() % 16 == 0)


def block_grid(device: torch.device, matrices: int, n: int, blocks: int, per_sm: int) -> Grid:
    """Four warps a block of threads, each a tile of 32 blocks at a time."""
    if n * blocks > _MAX_BLOCKS:
        raise ValueError(
            f"CUDA kernels: a matrix may have {_MAX_BLOCKS} blocks of 32 weights, got {n} rows of {blocks}. "
            f"Split its rows."
        )
    wanted = driver.device_limits(device.index).multiprocessors * per_sm
    y = min(matrices, wanted, driver.MAX_GRID_Y)
    needed = -(-n * blocks // (_TILES * 4))
    return min(needed, -(-wanted // y)), y, 1


def tile_grid(device: torch.device, matrices: int, row_tiles: int, column_tiles: int) -> Grid:
    """Eight warps a block of threads, each a tile of 16 x 64 at a time."""
    z, y = min(matrices, driver.MAX_GRID_Y), min(row_tiles, driver.MAX_GRID_Y)
    wanted = -(-driver.device_limits(device.index).multiprocessors * _TILED_PER_SM // (z * y))
    return min(-(-column_tiles // 8), wanted), y, z


def staying_grid(device: torch.device, tiles: int, warps: int, per_sm: int) -> Grid:
    """Blocks of `warps`, a tile a warp at a time, no more than run at once."""
    most = driver.device_limits(device.index).multiprocessors * per_sm
    return min(-(-tiles // warps), most), 1, 1


def launch(
    spec: KernelSpec,
    format: str,
    device: torch.device,
    grid: Grid,
    warps: int,
    args: tuple[int, ...],
    *,
    smem: int = 0,
    dependent: bool = False,
) -> None:
    """Launch `warps` a block; `dependent`: may start before the previous kernel is done."""
    kernel = launcher.load(spec, device.index, format)
    launcher.launch_on(device.index, kernel, grid, warps * driver.WARP, args, smem=smem, pdl=dependent)
