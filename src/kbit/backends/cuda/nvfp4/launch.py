"""What the launches of NVFP4 kernels have in common."""

from __future__ import annotations

import torch

from kbit.backends.cuda import driver, launcher
from kbit.backends.cuda.compiler import KernelSpec
from kbit.format import nvfp4_layout

SUB_BLOCK = nvfp4_layout.BLOCK
THREADS = 256  # of a block, at most
# Eight blocks of 256 threads fill a multiprocessor; four times that evens out the end.
_PER_SM = 32
_MAX_ITEMS = 2**31 - 1  # numbers of work items are 32 bits in the kernels


def groups_of(columns: int) -> int:
    """Scales of a row of so many columns."""
    return -(-columns // SUB_BLOCK)


def empty_coded(like: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for codes and scales of so many rows, where another tensor is."""
    groups = groups_of(columns)
    codes = like.new_empty((rows, groups * SUB_BLOCK // 2), dtype=torch.uint8)
    return codes, like.new_empty((rows, groups), dtype=torch.uint8)


def run_items(
    spec: KernelSpec,
    format: str,
    device: torch.device,
    items: int,
    args: tuple[int | float, ...],
    per_block: int | None = None,
    threads: int | None = None,
) -> None:
    """Launch a kernel whose blocks, of `threads`, deal `items` among them, `per_block` at a time.

    Left out, an item is a thread's; and without `threads` few items are dealt to all multiprocessors, in
    smaller blocks. The kernel starts while the one in front still runs, and must wait before it reads what
    that may write: see follow_previous in common.cuh. All kernels of NVFP4 do.

    Raises:
        ValueError: there are 2^31 items or more.
    """
    if items > _MAX_ITEMS:
        raise ValueError(
            f"nvfp4: {spec.entry} numbers its work with 31 bits, got {items} items. Split the rows."
        )
    if items == 0:
        return
    multiprocessors = driver.device_limits(device.index).multiprocessors
    if threads is None:
        threads = min(THREADS, -(-items // (multiprocessors * driver.WARP)) * driver.WARP)
    most = multiprocessors * _PER_SM * (THREADS // threads)
    kernel = launcher.load(spec, device.index, format)
    grid = (min(-(-items // (per_block or threads)), most), 1, 1)
    launcher.launch_on(device.index, kernel, grid, threads, args, pdl=True)
