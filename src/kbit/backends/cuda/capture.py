"""CUDA graphs by torch, which nothing beside the capture ends, and after whose failure all goes on as before.

What torch leaves to whoever captures (2.9 to 2.13):
* A graph that is destroyed during a capture ends it, as does whatever else must not be called then. Models
  hold themselves and their graphs in cycles, so the garbage collector destroys those of an old one any time.
* A capture that the driver ended leaves its stream the current one, the device's random numbers waiting for
  more of it, so that sampling raises from then on, and its memory for ever in use.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import torch

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def capture(
    graph: torch.cuda.CUDAGraph, device: torch.device | None = None, pool: Any = None
) -> Iterator[None]:
    """Capture into a graph what the body launches, as `torch.cuda.graph`, on a stream of its own.

    Other threads may call what captures forbid; they may not capture themselves meanwhile, and wait.

    Args:
        graph: empty.
        device: whose work it is; None: the current one.
        pool: of `torch.cuda.graph_pool_handle`, where graphs share their memory; None: one of its own. After
            a capture that failed, torch refuses the pool to others.

    Raises:
        RuntimeError: the body did what a graph cannot hold, such as waiting for the device.
    """
    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    pool = torch.cuda.graph_pool_handle() if pool is None else pool
    with _ONE_AT_A_TIME, _garbage_stays(), torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, **_how(device), pool=pool):
                yield
        except BaseException:
            torch.cuda.set_stream(stream)
            with contextlib.suppress(RuntimeError):  # the capture's own error says more
                _clean_up(device, pool)
            raise


@contextlib.contextmanager
def _garbage_stays() -> Iterator[None]:
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _how(device: torch.device) -> dict[str, Any]:
    # Left out, the stream is of the device of the first capture, and other threads' calls are refused.
    return {"stream": torch.cuda.Stream(device), "capture_error_mode": "thread_local"}


def _clean_up(device: torch.device, pool: Any) -> None:
    """What torch leaves out at the end of a capture that failed; where it left nothing out, nothing."""
    torch.cuda.synchronize(device)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), **_how(device)):
        torch.zeros(1, device=device)  # random numbers wait for the end of the last capture, whichever
    torch._C._cuda_endAllocateToPool(device.index, pool)  # raises if the capture ended by itself
    torch._C._cuda_releasePool(device.index, pool)
