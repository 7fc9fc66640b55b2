"""The timing protocol on CPUs, of `kbit bench cpu`; that on GPUs is `kbit.bench.gpu_timing`.

Pitfalls it avoids, each of which changed a table by tens of percent:
* Warm weights. A 31 MB weight that stays in a 32 MB cache reads several times faster than one that a model
  with other layers has pushed out. So as many copies as exceed the last-level cache several times over are
  used in rotation, for both arms.
* One arm after the other. Clocks and neighbours drift; the arms of one row are interleaved call by call.
* Means. One page fault or interrupt moves them; the median of at least seven calls does not care.
* Untouched pages. `torch.empty` maps every page to the same zeros, and reads of them never reach memory;
  copies are written first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from kbit.bench.repeats import MIN_REPEATS, check_repeats, median_and_spread

Key = TypeVar("Key", bound=Hashable)

# Copies in rotation hold at least this many times the last-level cache.
CACHE_FACTOR = 3


@dataclass(frozen=True)
class Timing:
    """Median time of a call in milliseconds, and (max - min) / median over the repeats."""

    median_ms: float
    spread: float


def copies_needed(nbytes: int, cache_bytes: int) -> int:
    """How many copies of a weight of `nbytes` are rotated so that each use finds it cold."""
    return max(2, -(-CACHE_FACTOR * cache_bytes // max(1, nbytes)) + 1)


def measure(
    calls: Mapping[Key, Callable[[int], object]], repeats: int = 9, max_seconds: float = 6.0
) -> dict[Key, Timing]:
    """Time several calls against each other.

    Args:
        calls: name -> function of the repeat's index; the index picks the copy of the weights.
        repeats: timed calls of each, after one that warms code and pages; at least `MIN_REPEATS`.
        max_seconds: stop repeating past this time, once `MIN_REPEATS` are done.

    Returns:
        name -> Timing, names in the order given.

    Raises:
        ValueError: fewer than `MIN_REPEATS` repeats.
    """
    check_repeats(repeats)
    samples: dict[Key, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    deadline = time.perf_counter() + max_seconds
    for index in range(1, repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call(index)
            samples[name].append(1e3 * (time.perf_counter() - start))
        if index >= MIN_REPEATS and time.perf_counter() > deadline:
            break
    return {name: Timing(*median_and_spread(values)) for name, values in samples.items()}


def read_bandwidth(repeats: int = 9) -> float:
    """GB/s at which all torch threads together read memory: the median sum of 512 MB of float32."""
    data = torch.ones(128 * 2**20, dtype=torch.float32)
    timing = measure({"read": lambda index: data.sum()}, repeats)["read"]
    return data.nbytes / timing.median_ms / 1e6
