"""Launches of kernels whose threads each compute an element, or a few, alone."""

from __future__ import annotations

from kbit.backends.cuda import launcher

_THREADS = 128  # of a block, where the kernel does not want more
# The kernels number their threads in an int, those of the last block that have nothing to do among them.
MOST_THREADS = 2**31 - 1024


def launch(
    device_index: int,
    kernel: launcher.Kernel,
    threads: int,
    args: tuple[int | float | bytes, ...],
    block: int = _THREADS,
) -> None:
    """Launch with programmatic dependent launch on torch's current stream; see `launcher.launch_on`.

    Args:
        device_index: as torch counts devices.
        kernel: what is launched.
        threads: of all blocks together, 1 to `MOST_THREADS`.
        args: the kernel's.
        block: threads of a block, at most 1024.
    """
    launcher.launch_on(device_index, kernel, (-(-threads // block), 1, 1), block, args, pdl=True)
