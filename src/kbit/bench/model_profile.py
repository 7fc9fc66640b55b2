"""Kernels of a decode step for the rows of `kbit bench model`, each counted in full where they overlap.

`kbit profile` (`kbit.bench.profile`) shares a step's time out among them instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from kbit.bench.kernel_kinds import kind_of

REPLAYS = 8


@dataclass(frozen=True)
class KernelTime:
    """A kernel's time in one step, and how often it runs there."""

    name: str
    kind: str
    us: float
    calls: float


def profile(run: Callable[[], object], replays: int = REPLAYS) -> list[KernelTime]:
    """Kernels of one call, the slowest first.

    Args:
        run: a step; kernels of CUDA graphs are seen one by one.
        replays: calls to average over; their effect must fit the caller's buffers.
    """
    from torch.profiler import ProfilerActivity

    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as recorded:
        for _ in range(replays):
            run()
        if on_gpu:
            torch.cuda.synchronize()
    totals: dict[str, list[float]] = defaultdict(list)
    for event in recorded.events() or ():
        us = _device_us(event) if on_gpu else float(event.self_cpu_time_total)
        if us:
            totals[event.name].append(us)
    found = [
        KernelTime(name, kind_of(name), sum(times) / replays, len(times) / replays)
        for name, times in totals.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.us)


def _device_us(event: Any) -> float:
    """Microseconds on the GPU; 0 for events of the host, which profilers list too."""
    if event.device_type != torch.autograd.DeviceType.CUDA:
        return 0.0
    return float(event.time_range.elapsed_us())


def as_json(kernels: list[KernelTime]) -> dict[str, Any]:
    """The profile for a result file: microseconds by purpose, most first, whose sum may exceed a step."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.kind] += kernel.us
    by_kind = dict(sorted(sums.items(), key=lambda item: -item[1]))
    rows = [
        asdict(kernel) | {"us": round(kernel.us, 2), "calls": round(kernel.calls, 2)} for kernel in kernels
    ]
    return {"by_kind_us": {kind: round(us, 1) for kind, us in by_kind.items()}, "kernels": rows}
