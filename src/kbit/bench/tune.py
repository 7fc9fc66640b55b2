"""`kbit tune`: measure which CUDA kernel, in which launch, is fastest for each problem, into a table.

The protocol is that of `kbit.bench.gpu_timing`. Every kernel that may take a problem competes, wgmma with
those of its launches whose estimate is near the best; the table (`kbit.backends.cuda.tables`) keeps the
fastest and the runner-up.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

import kbit.ops as ops
from kbit.backends.cuda import driver, mma, preference, products, stream, tables, wgmma, wgmma_config
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.preference import Choice
from kbit.backends.cuda.tables import Problem, Row
from kbit.bench import gpu_timing
from kbit.bench.correctness import require_close
from kbit.bench.shapes import LayerShape
from kbit.bench.tune_record import Record
from kbit.bench.tune_sources import sources_digest

# A row serves down to half its tokens; between 16 and 1024, where plans change most, they lie closer.
ROWS = (1, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 576, 768, 1024, 2048, 4096, 8192)
# The estimated best takes 1% longer than the best on average; 1.6 times leaves room for error.
ESTIMATE_RANGE = 1.6
MOST_PLANS = 7  # of each kind: estimates of different kinds are further off
# As many as the protocol wants at least: a whole table takes minutes.
REPEATS = 7
_CHECKED_ROWS = 16

# Microseconds of each candidate of a problem with M tokens.
Measure = Callable[[Problem, int, Mapping[str, Choice]], Mapping[str, float]]


def problems(
    shapes: Iterable[LayerShape], bits: Sequence[int], dtypes: Sequence[str], gated: bool
) -> list[Problem]:
    """One for each different size, width and dtype; with `gated` merged gates and ups, fused, as well."""
    found = []
    for shape in shapes:
        sizes = [(shape.out_features, False)]
        if gated and "gate" in shape.use:
            sizes.append((2 * shape.out_features, True))
        found += [
            Problem(n, shape.in_features, width, fused, dtype)
            for n, fused in sizes
            for dtype in dtypes
            for width in bits
        ]
    return list(dict.fromkeys(found))


def candidates(m: int, problem: Problem, device: driver.DeviceLimits) -> dict[str, Choice]:
    """What competes for a problem: the kernels that may take it, wgmma with its likely launches.

    Where there is wgmma, mma is left out: on an H200 it takes about twice as long.
    """
    dtype = tables.DTYPES[problem.dtype]
    refusals = preference.refusals_of(m, dtype, problem.out_features, problem.gated, device.arch)
    found = {name: Choice(name) for name in ("stream", "cublas") if refusals[name] is None}
    if refusals["wgmma"] is None:
        for plan in likely_plans(m, problem, device):
            found[f"wgmma {plan.tiling}"] = Choice("wgmma", plan)
    elif refusals["mma"] is None:
        found["mma"] = Choice("mma")
    return found


def likely_plans(m: int, problem: Problem, device: driver.DeviceLimits) -> list[wgmma.Plan]:
    """Launches of wgmma, the best of each kind by estimate; none of more tokens than one block needs.

    Kinds of which all are far behind by estimate are left out.
    """
    costs = wgmma.candidates(m, problem.weight_on(device))
    enough = next((tokens for tokens in wgmma_config.TOKENS if tokens >= m), wgmma_config.TOKENS[-1])
    plans = sorted((plan for plan in costs if plan.tiling.tokens <= enough), key=lambda plan: costs[plan])
    kinds: dict[tuple[int, bool, bool], list[wgmma.Plan]] = {}
    for plan in plans:
        if costs[plan] <= ESTIMATE_RANGE * costs[plans[0]]:
            kinds.setdefault(plan.tiling.kind, []).append(plan)
    return [plan for kind in kinds.values() for plan in kind[:MOST_PLANS]]


def specs(tasks: Iterable[tuple[Problem, int]], device: driver.DeviceLimits) -> list[tuple[KernelSpec, str]]:
    """The kernels that the tasks need, to be compiled in parallel beforehand."""
    found: dict[tuple[KernelSpec, str], None] = {}
    for problem, m in tasks:
        dtype = tables.DTYPES[problem.dtype]
        weight = problem.weight_on(device)
        for choice in candidates(m, problem, device).values():
            if choice.kernel == "stream":
                counts = {min(m, stream.TOKENS[-1]), m % stream.TOKENS[-1] or stream.TOKENS[-1]}
                for plan in (stream.plan(min(m, count), weight) for count in counts):
                    found[plan.config.spec(problem.bits, dtype, plan.tokens), device.arch] = None
            elif choice.kernel == "mma":
                kernels = mma.kernels_of(mma.plan(m, weight), dtype, weight)
                found |= dict.fromkeys((kernel, device.arch) for kernel in kernels)
            elif choice.plan is not None:
                launch = choice.plan
                block = wgmma_config.of_tiling(problem.bits, launch.tiling, launch.teams, False, False)
                found[wgmma_config.spec(block, dtype), device.arch] = None
    return list(found)


def provenance() -> dict[str, object]:
    """What the current GPU's table is measured with, as JSON values."""
    about = gpu_timing.describe()
    names = ("gpu", "driver", "cuda", "torch", "kbit", "commit", "date")
    return {name: about[name] for name in names} | {"sources": sources_digest()}


def winner(m: int, found: Mapping[str, Choice], us: Mapping[str, float]) -> Row:
    """The table's row of measured candidates; of equal ones the first."""
    order = sorted(found, key=lambda label: us[label])
    best, second = found[order[0]], order[1] if len(order) > 1 else None
    return Row(
        m=m,
        kernel=best.kernel,
        tiling=best.plan.tiling if best.plan else None,
        us=round(us[order[0]], 3),
        runner_up=second,
        runner_up_us=None if second is None else round(us[second], 3),
    )


def tune(
    tasks: Sequence[tuple[Problem, int]],
    record: Record,
    measure: Measure,
    seconds: float | None = None,
    on_done: Callable[[Problem, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Measure what the record lacks, and write it after each problem's last M and in any case at the end.

    Args:
        tasks: (problem, M), those of a problem together.
        record: where rows go.
        measure: times candidates.
        seconds: begin nothing after so many.
        on_done: called after each task, those that were there included.
        clock: seconds that pass.

    Returns:
        Whether all tasks are done.
    """
    start, previous = clock(), None
    try:
        for problem, m in tasks:
            if problem != previous:
                record.save()
            previous = problem
            if not record.has(problem, m):
                if seconds is not None and clock() - start >= seconds:
                    return False
                found = candidates(m, problem, record.device)
                record.add(problem, winner(m, found, measure(problem, m, found)))
            if on_done is not None:
                on_done(problem, m)
        return True
    finally:
        record.save()


@dataclass
class GpuMeasure:
    """`Measure` on the current GPU; keeps cold copies of the last problem's weight."""

    repeats: int = REPEATS
    timer: gpu_timing.Timer = gpu_timing.measure
    _problem: Problem | None = None
    _copies: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def __call__(self, problem: Problem, m: int, found: Mapping[str, Choice]) -> dict[str, float]:
        """Median microseconds of each candidate."""
        if problem != self._problem:
            self._copies = []  # before the next ones are made
            torch.cuda.empty_cache()
            self._copies, self._problem = _copies(problem), problem
        dtype, n = tables.DTYPES[problem.dtype], problem.out_features
        # Results of about 1: a gate times an up would leave float16's range.
        x = (torch.randn(m, problem.in_features, device="cuda") / problem.in_features**0.5).to(dtype)
        out = torch.empty(m, n // 2 if problem.gated else n, device="cuda", dtype=dtype)
        calls = {label: self._calls(problem, choice, x, out) for label, choice in found.items()}
        _check_results(problem, m, calls, out)
        arms = {label: gpu_timing.Arm(functions) for label, functions in calls.items()}
        return {label: timing.us for label, timing in self.timer(arms, self.repeats).items()}

    def _calls(
        self, problem: Problem, choice: Choice, x: torch.Tensor, out: torch.Tensor
    ) -> list[Callable[[], None]]:
        size = (problem.out_features, problem.in_features, problem.gated)
        return [
            functools.partial(products.launch, choice, x, *weight, None, *size, out)
            for weight in self._copies
        ]


def _copies(problem: Problem) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(tiled, codebook, scale) of random weights, as often as the protocol rotates them."""
    generator = torch.Generator("cuda").manual_seed(0)
    size = (problem.out_features, problem.in_features)
    w = torch.randn(size, generator=generator, device="cuda").to(tables.DTYPES[problem.dtype])
    q = ops.quantize(w, bits=problem.bits, search=False).tile()
    assert q.tiled is not None
    count = gpu_timing.cold_copies(q.tiled.nbytes)
    return [(q.tiled.clone(), q.codebook, q.scale) for _ in range(count)]


@torch.no_grad()
def _check_results(
    problem: Problem, m: int, calls: Mapping[str, Sequence[Callable[[], None]]], out: torch.Tensor
) -> None:
    """Compare some rows of each candidate with decoding + cuBLAS.

    Raises:
        ValueError: a kernel computes something else.
    """
    some = torch.linspace(0, m - 1, min(m, _CHECKED_ROWS), device="cuda").long()
    calls["cublas"][0]()
    expected = out[some].float()
    for label, functions in calls.items():
        out.fill_(torch.nan)
        functions[0]()
        require_close(f"tune: {label}", out[some], expected, f"{problem}, M={m}")
