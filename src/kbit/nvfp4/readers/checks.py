"""Checks of what a file claims to be NVFP4, before any kernel sees it, and whether it is still the same."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from kbit.nvfp4.quantize import is_normal

# Headers of so many checkpoints stay parsed: a model has thousands of layers, each read by a call of its own.
KNOWN = 4
# In nanoseconds; clocks of file systems tick every few milliseconds, or every second.
_YOUNG = 2 * 10**9

Stamp = tuple[str, int, int, int, int]


def stamp(path: Path) -> Stamp:
    """What differs once a file has been written anew: name, inode, size, time of the last change.

    Two writes within a tick bear one time, so the stamp of a young file is another at every call.

    Raises:
        OSError: there is no such file.
    """
    status, now = path.stat(), time.time_ns()
    young = now if now - status.st_mtime_ns < _YOUNG else 0
    return path.name, status.st_ino, status.st_size, status.st_mtime_ns, young


def refuse_missing(path: Path, reader: str, kind: str) -> None:
    """Raise FileNotFoundError if there is nothing at `path` for a reader of files of a kind."""
    if not path.exists():
        raise FileNotFoundError(
            f"{reader}: there is no {path}. Give {kind} on this machine; fetch a model of the Hub first: "
            f"hf download."
        )


def check_scale_bytes(scales: torch.Tensor, where: str) -> None:
    """Scales are unsigned: bit 7 must be 0, and so is NaN's byte refused.

    Raises:
        ValueError: some scale is negative or NaN.
    """
    bad = int((scales >= 0x7F).sum())
    if bad:
        raise ValueError(
            f"{where}: {bad} block scales are negative or NaN; ue4m3 ends at byte 0x7E (448). The file is "
            f"damaged or not NVFP4; fetch it again."
        )


def check_global_scale(value: float, where: str) -> float:
    """A tensor's factor must be a positive normal float32.

    Raises:
        ValueError: it is not.
    """
    if not is_normal(value):
        raise ValueError(
            f"{where}: a tensor's scale must be a positive normal float32, got {value}. The file is damaged; "
            f"fetch it again."
        )
    return value
