"""The timing protocol on GPUs, of every measurement of kernels; that on CPUs is `kbit.bench.cpu_timing`.

Pitfalls it avoids, each of which changed a table:
* Warm weights. A layer whose weights stay in L2 (60 MB on H200) reads faster than memory delivers. As many
  copies as hold `CACHE_FACTOR` times the L2 are used in turn, for every arm. Three times would do for an
  LRU cache; a cache that evicts at random still hits e^-3 = 5% of the time, and e^-5 = 0.7% at five.
* Launches. From Python a launch costs as much as a small layer. All calls of an arm are one CUDA graph.
* A graph's own start. Between the start event and the first kernel pass one or two microseconds, 1% of a
  graph of four 30 us calls. Short graphs hold several rounds of the copies, `MIN_GRAPH_MS` at least.
* An idle queue. If the GPU waits for the CPU to submit the graph, the wait is measured. A spin of about
  0.2 ms before the start event lets the submission get ahead.
* One arm after the other. Clocks, power and neighbours drift: cuBLAS on 8192x28672 differed by 3% between two
  runs, ratios within a run by less. The arms of a problem are interleaved, replay by replay,
  in another order each round.
* First calls. They compile, choose algorithms, make layouts. Each copy is called once before the capture.
* Means. The median of at least seven replays does not care about one outlier; the spread shows it.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from kbit.backends.cuda.capture import capture
from kbit.bench import machine
from kbit.bench.repeats import check_repeats, median_and_spread

Key = TypeVar("Key", bound=Hashable)

DEFAULT_REPEATS = 11
CACHE_FACTOR = 5
MIN_COPIES = 4
# Of one arm; with six arms the largest layer still fits a 24 GB card.
MAX_COPY_BYTES = 3 * 2**30
MIN_GRAPH_MS = 0.5
SPIN_CYCLES = 400_000
# Right after products of 8192 tokens, 8192 x 28672 by one token took 39 us on an H200, else 32.
REST_SECONDS = 0.5
READ_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Arm:
    """One competitor: a call for each copy of its weights, and variables set while it is captured."""

    calls: Sequence[Callable[[], object]]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class GpuTiming:
    """Median time of one call in microseconds, and (max - min) / median over the replays."""

    us: float
    spread: float


# Arms and repeats to timings, keys in the order given; `measure` or `ncu.record`.
Timer = Callable[[Mapping[Key, Arm], int], dict[Key, GpuTiming]]


def unavailable_reason() -> str | None:
    """Why nothing can be measured on a GPU here; None where it can."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} sees no CUDA device"


def require_gpu(command: str, or_cpu: bool = False) -> None:
    """Raises ValueError where there is no GPU to measure on; `or_cpu`: the command has --device cpu."""
    reason = unavailable_reason()
    if reason is not None:
        instead = (
            "--device cpu measures on the CPU" if or_cpu else "`kbit bench cpu` measures the CPU kernels"
        )
        raise ValueError(f"{command} needs an NVIDIA GPU: {reason}. {instead}.")


def copies_needed(nbytes: int, cache_bytes: int, max_bytes: int = MAX_COPY_BYTES) -> int:
    """How many copies of a weight of `nbytes` are rotated so that each call finds it cold.

    Enough for `CACHE_FACTOR` caches and at least `MIN_COPIES`, but no more than `max_bytes` hold, and two in
    any case: where the cap bites, a copy is many caches large.
    """
    nbytes = max(1, nbytes)
    wanted = max(MIN_COPIES, -(-CACHE_FACTOR * cache_bytes // nbytes))
    return max(2, min(wanted, max_bytes // nbytes))


def l2_bytes() -> int:
    """Size of the current GPU's L2 cache."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def cold_copies(nbytes: int) -> int:
    """`copies_needed` of a weight of `nbytes` on the current GPU."""
    return copies_needed(nbytes, l2_bytes())


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def rest() -> None:
    """Let the GPU recover from what was measured before."""
    torch.cuda.synchronize()
    time.sleep(REST_SECONDS)


def warm_up(arm: Arm) -> None:
    """Call every copy once and wait."""
    with environment(arm.environment):
        for call in arm.calls:
            call()
    torch.cuda.synchronize()


def _capture(arm: Arm, rounds: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with environment(arm.environment), capture(graph):
        for _ in range(rounds):
            for call in arm.calls:
                # The result dies at once, so that every call of the graph writes the same memory.
                call()
    return graph


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _prepare(arm: Arm) -> tuple[torch.cuda.CUDAGraph, int]:
    """A warm graph of at least `MIN_GRAPH_MS`, and the number of calls in it."""
    warm_up(arm)
    graph, rounds = _capture(arm, 1), 1
    graph.replay()
    once = _replay_ms(graph)
    if once < MIN_GRAPH_MS:
        rounds = int(-(-MIN_GRAPH_MS // once))
        graph = _capture(arm, rounds)
        graph.replay()
    return graph, rounds * len(arm.calls)


@torch.no_grad()
def measure(arms: Mapping[Key, Arm], repeats: int = DEFAULT_REPEATS) -> dict[Key, GpuTiming]:
    """Time arms against each other on the current GPU.

    Args:
        arms: name -> Arm.
        repeats: timed replays of each, after one that warms; at least `repeats.MIN_REPEATS`.

    Returns:
        name -> GpuTiming, names in the order given.

    Raises:
        ValueError: fewer than `repeats.MIN_REPEATS` repeats.
    """
    check_repeats(repeats)
    graphs = {key: _prepare(arm) for key, arm in arms.items()}
    samples: dict[Key, list[float]] = {key: [] for key in arms}
    for turn in range(repeats):
        # In another order each time: under the GPU's power limit, what ran before decides the clocks.
        for key in random.Random(turn).sample(list(graphs), len(graphs)):
            graph, calls = graphs[key]
            samples[key].append(1e3 * _replay_ms(graph) / calls)
    return {key: summarize(values) for key, values in samples.items()}


def summarize(microseconds: Sequence[float]) -> GpuTiming:
    """Median and spread of samples."""
    return GpuTiming(*median_and_spread(microseconds))


@dataclass(frozen=True)
class Bandwidth:
    """GB/s at which the GPU reads its memory, and how that was found."""

    gb_s: float
    method: str


def read_bandwidth(repeats: int = DEFAULT_REPEATS) -> Bandwidth:
    """Read a few GB of random float32 by several of torch's reductions; the fastest stands for the machine.

    Nothing is written but the result, as in decoding. A copy would count both directions, and turning the
    bus around costs it several percent.
    """
    free, _ = torch.cuda.mem_get_info()
    nbytes = min(READ_BYTES, free // 4)
    data = torch.rand(nbytes // 4 // 2**16, 2**16, device="cuda")
    reads: dict[str, Callable[[], object]] = {
        "sum": data.sum,
        "sum of rows": lambda: data.sum(1),
        "amax": data.amax,
        "amax of rows": lambda: data.amax(1),
    }
    results = measure({name: Arm([read]) for name, read in reads.items()}, repeats)
    name, result = min(results.items(), key=lambda item: item[1].us)
    return Bandwidth(
        data.nbytes / result.us / 1e3, f"torch {name} over {data.nbytes / 2**30:.1f} GiB, read only"
    )


def result_header(repeats: int) -> dict[str, Any]:
    """What a result file says ahead of its rows: machine, bandwidth, which is measured now, and repeats."""
    bandwidth = read_bandwidth()
    return {
        "machine": describe(),
        "read_bandwidth_gb_s": round(bandwidth.gb_s, 1),
        "read_bandwidth_method": bandwidth.method,
        "repeats": repeats,
    }


def describe(device: torch.device | str = "cuda") -> dict[str, object]:
    """What a result was measured on, as JSON values: the machine and, if `device` is a GPU, that one.

    "cuda" is the current one.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return machine.describe()
    index = torch.cuda.current_device() if device.index is None else device.index
    about = torch.cuda.get_device_properties(index)
    return machine.describe() | {
        "gpu": about.name,
        "compute_capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "l2_mb": round(about.L2_cache_size / 2**20, 1),
        "driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    """The driver's version, one for all GPUs of a machine; None where nvidia-smi cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    except (OSError, subprocess.CalledProcessError):
        return None
    return lines[0] if lines else None
