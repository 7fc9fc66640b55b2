"""`kbit profile`: one decode step of a model, kernel by kernel, and what removing each would gain at most.

On a GPU the step is a CUDA graph's replay where it can be captured, and kernels are its own; on a CPU they
are PyTorch's operators by their own time, without what they call. Shares come from the profiler's timeline.
Profiling slows a step down, so microseconds are these shares of the time of a step without profiler.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kbit.bench.kernel_kinds import PYTHON, kind_of
from kbit.bench.model_decode import DecodeLoop

REPEATS = 5
_STEP = "kbit profile: decode step"


@dataclass(frozen=True)
class Part:
    """A kernel, or all of one purpose, in one step: calls and microseconds of a step of `step_us`."""

    kernel: str
    group: str
    calls: float
    us: float
    step_us: float

    @property
    def share(self) -> float:
        """Its part of the step's time."""
        return self.us / self.step_us

    @property
    def step_without_us(self) -> float:
        """The step, were this gone altogether."""
        return max(0.0, self.step_us - self.us)

    @property
    def ceiling(self) -> float:
        """How many times as fast that would be: no work on this can gain more."""
        return self.step_us / self.step_without_us if self.step_without_us else math.inf


@dataclass(frozen=True)
class StepProfile:
    """Where one step goes.

    Attributes:
        step_us: median time of a step, without profiler.
        profiled_step_us: with it; shares are of this.
        busy: share of the step in which the device runs anything.
        reason: why the step was no CUDA graph; None if it was.
        kernels: the slowest first.
    """

    device: str
    batch: int
    context: int
    step_us: float
    profiled_step_us: float
    busy: float
    reason: str | None
    kernels: tuple[Part, ...]

    @property
    def groups(self) -> tuple[Part, ...]:
        """Kernels summed by purpose, the slowest first: the levers."""
        calls: dict[str, float] = defaultdict(float)
        us: dict[str, float] = defaultdict(float)
        for part in self.kernels:
            calls[part.group] += part.calls
            us[part.group] += part.us
        parts = [Part(group, group, calls[group], us[group], self.step_us) for group in us]
        return tuple(sorted(parts, key=lambda part: -part.us))


def attribute(intervals: Iterable[tuple[str, float, float]]) -> dict[str, float]:
    """Time of each name so that the sum is the time in which anything runs.

    Where intervals overlap (kernels with programmatic dependent launch start before the last has ended), the
    moment belongs to the one that started first.

    Args:
        intervals: (name, start, end), in any order.
    """
    times: dict[str, float] = defaultdict(float)
    done = -math.inf
    for name, start, end in sorted(intervals, key=lambda item: (item[1], item[2])):
        times[name] += max(0.0, end - max(start, done))
        done = max(done, end)
    return dict(times)


def profile_step(
    model: Any,
    batch: int = 1,
    context: int = 128,
    steps: int = 16,
    graph: bool = True,
    repeats: int = REPEATS,
) -> StepProfile:
    """Profile one decode step.

    Args:
        model: a causal language model of transformers in evaluation mode, on the device in question.
        batch: sequences decoded at once.
        context: tokens of each in the cache before.
        steps: steps to average over.
        graph: capture the step as a CUDA graph where that is possible.
        repeats: how often `steps` steps are timed without profiler; the median counts.

    Raises:
        ValueError: the model's cache has sliding windows.
    """
    loop = DecodeLoop(model, batch, context, steps)
    loop.read_prompt()
    loop.warm_up()
    run, reason = loop.captured() if graph else (loop.step, "not asked for")
    timing = loop.measure(run, repeats, reason)
    loop.rewind()
    on_gpu = loop.device.type == "cuda"
    record = _record_gpu if on_gpu else _record_cpu
    window, times, calls = record(run, steps)
    step_us = 1e3 * timing.ms
    parts = [
        Part(name, kind_of(name), calls[name] / steps, us / window * step_us, step_us)
        for name, us in times.items()
    ]
    busy = sum(us for name, us in times.items() if name != PYTHON) / window
    parts.sort(key=lambda part: -part.us)
    device = loop.device.type
    return StepProfile(device, batch, context, step_us, window / steps, busy, reason, tuple(parts))


# What was recorded: microseconds of all steps, and of each name with its calls.
_Recorded = tuple[float, dict[str, float], dict[str, int]]


def _record_gpu(run: Callable[[], object], steps: int) -> _Recorded:
    """The device's timeline, from the first kernel's start to the last one's end."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    intervals = [
        (event.name, float(event.time_range.start), float(event.time_range.end))
        for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return timeline(intervals)


def timeline(intervals: Sequence[tuple[str, float, float]]) -> _Recorded:
    """Window, times and calls of (name, start, end) intervals.

    Raises:
        ValueError: there is none.
    """
    if not intervals:
        raise ValueError("profile: the profiler saw no kernel. Is another profiler attached to the GPU?")
    calls: dict[str, int] = defaultdict(int)
    for name, _, _ in intervals:
        calls[name] += 1
    window = max(end for _, _, end in intervals) - min(start for _, start, _ in intervals)
    return window, attribute(intervals), dict(calls)


def _record_cpu(run: Callable[[], object], steps: int) -> _Recorded:
    """Operators by their own time; what is left of the steps is Python between them."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            with torch.profiler.record_function(_STEP):
                run()
    averages = recorded.key_averages()
    (whole,) = (item for item in averages if item.key == _STEP)
    times = {PYTHON: float(whole.self_cpu_time_total)}
    calls = {PYTHON: steps}
    for item in averages:
        if item.key != _STEP:
            times[item.key], calls[item.key] = float(item.self_cpu_time_total), item.count
    return float(whole.cpu_time_total), times, calls


def as_json(profile: StepProfile, model: str, arm: str = "") -> dict[str, Any]:
    """The profile for a result file, with shares and ceilings written out for readers.

    `arm` is such as "kbit k=4" where a model of random weights was built in several ways.
    """
    return {
        "model": model,
        "arm": arm,
        "device": profile.device,
        "batch": profile.batch,
        "context": profile.context,
        "graph": profile.reason is None,
        "reason": profile.reason,
        "step_us": round(profile.step_us, 2),
        "profiled_step_us": round(profile.profiled_step_us, 2),
        "busy": round(profile.busy, 4),
        "groups": [_part(part) for part in profile.groups],
        "kernels": [_part(part) for part in profile.kernels],
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        "kernel": part.kernel,
        "group": part.group,
        "calls": round(part.calls, 2),
        "us": round(part.us, 3),
        "share": round(part.share, 5),
        "step_without_us": round(part.step_without_us, 2),
        "ceiling": round(part.ceiling, 4) if math.isfinite(part.ceiling) else None,
    }
