"""Where a decode step goes: time of every kernel in it, by torch's profiler."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

REPLAYS = 8
# The first pattern found in a kernel's name decides; the last takes the rest.
_KINDS = (
    ("kbit", r"^(stream|grouped|wgmma|dequantize(_tiled)?|repack|quantize)$"),
    ("kbit routing", r"^moe_(align|combine)$"),
    ("attention", r"fmha|flash|attention|softmax_warp|softmax.*attn"),
    ("16-bit products", r"gemm|gemv|cutlass|nvjet|cublas|_mm_|sm\d+_xmma|splitK"),
    ("convolution", r"conv"),
    ("sort, top-k", r"topk|sort|radix|gatherTopK|bitonic|Histogram|scan"),
    ("copy, gather, index", r"copy|index|gather|scatter|Cat|memcpy|memset|arange|fill"),
    ("reduction", r"reduce|softmax|norm"),
    ("elementwise", r"elementwise|triton"),
    ("other", r""),
)


@dataclass(frozen=True)
class KernelTime:
    """A kernel's time in one step, and how often it runs there."""

    name: str
    kind: str
    us: float
    calls: float


def kind_of(name: str) -> str:
    """What a kernel is for, judged by its name."""
    return next(kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))


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


def by_kind(kernels: list[KernelTime]) -> dict[str, float]:
    """Microseconds per step by purpose, most first."""
    sums: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        sums[kernel.kind] += kernel.us
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def as_json(kernels: list[KernelTime]) -> dict[str, Any]:
    """The profile for a result file. Kernels that overlap count in full, so the sum may exceed a step."""
    rows = [
        asdict(kernel) | {"us": round(kernel.us, 2), "calls": round(kernel.calls, 2)} for kernel in kernels
    ]
    return {"by_kind_us": {kind: round(us, 1) for kind, us in by_kind(kernels).items()}, "kernels": rows}
