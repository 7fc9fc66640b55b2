"""Share of each kernel and speed-up over 16 bits, by number of users and width."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kbit.bench.kernel_rows import ALL_ROWS, COMMAND
from kbit.bench.workload import scheduler
from kbit.bench.workload.distributions import Traffic
from kbit.bench.workload.model_layers import ModelLayers
from kbit.bench.workload.scheduler import Limits, Step
from kbit.bench.workload.times import GROUPED_LABEL, NotMeasured, Times
from kbit.format import SUPPORTED_BITS


@dataclass(frozen=True)
class Scenario:
    """`us` and `baseline_us` are times of all layers of one block in one iteration, on average.

    `shares` are of `us` and sum to 1; `decode_only` is the share of iterations without a prompt, `tokens` the
    mean M.
    """

    model: str
    users: int
    bits: int
    dtype: str
    us: float
    baseline_us: float
    shares: Mapping[str, float]
    decode_only: float
    tokens: float

    @property
    def speedup(self) -> float:
        """16-bit time / ours, each iteration weighted by how often it happens."""
        return self.baseline_us / self.us


def steps_of(
    traffic: Traffic, users: Sequence[int], limits: Limits, turns: int, seed: int
) -> dict[int, Mapping[Step, float]]:
    """Iterations by number of users: exact for one, simulated for more, all with the same turns.

    Raises:
        ValueError: see `scheduler.serve`.
    """
    drawn = traffic.turns(turns, seed) if any(count > 1 for count in users) else []
    result: dict[int, Mapping[Step, float]] = {}
    for count in users:
        limits.check(count)
        if count == 1:
            result[count] = scheduler.alone(traffic, limits.budget)
        else:
            result[count] = scheduler.serve(drawn, count, limits).steps
    return result


def scenario(
    model: ModelLayers,
    times: Times,
    steps: Mapping[Step, float],
    users: int,
    bits: int,
    experts: bool = False,
) -> Scenario:
    """Weigh the times of a block by how often each M happens.

    Args:
        model: its layers.
        times: measured.
        steps: iterations and their weights.
        users: for the result.
        bits: width.
        experts: whether expert layers count.

    Raises:
        NotMeasured: the table lacks a layer, width or M.
    """
    spent: dict[str, float] = {}
    baseline = 0.0
    for tokens, weight in scheduler.by_tokens(steps).items():
        for kernel, ours, dense in _layers(model, times, tokens, bits, experts):
            spent[kernel] = spent.get(kernel, 0.0) + weight * ours
            baseline += weight * dense
    iterations = math.fsum(steps.values())
    total = math.fsum(spent.values())
    return Scenario(
        model.name,
        users,
        bits,
        times.dtype,
        total / iterations,
        baseline / iterations,
        {kernel: us / total for kernel, us in spent.items()},
        math.fsum(weight for step, weight in steps.items() if not step.prefill) / iterations,
        math.fsum(weight * step.tokens for step, weight in steps.items()) / iterations,
    )


def _layers(
    model: ModelLayers, times: Times, tokens: int, bits: int, experts: bool
) -> Iterator[tuple[str, float, float]]:
    """(kernel, its time, 16-bit time) of every layer, as often as it runs in a block."""
    for shape in model.dense:
        ours, baseline = (shape.count * times.us(shape, width, tokens) for width in (bits, None))
        yield times.kernel(shape, bits, tokens), ours, baseline
    for shape in model.experts if experts else ():
        ours, baseline = (
            shape.count * times.grouped_us(shape, width, model.experts_per_token, tokens)
            for width in (bits, None)
        )
        yield GROUPED_LABEL, ours, baseline


@dataclass(frozen=True)
class Analysis:
    """All scenarios of a model, and what was left out of them and why."""

    model: str
    scenarios: tuple[Scenario, ...]
    notes: tuple[str, ...]

    def slower_from(self, bits: int) -> int | None:
        """Fewest users at whom this width is slower than 16 bits; None where it never is."""
        return min(
            (item.users for item in self.scenarios if item.bits == bits and item.speedup < 1), default=None
        )


def analyse(
    model: ModelLayers, times: Times, steps: Mapping[int, Mapping[Step, float]], bits: Sequence[int] = ()
) -> Analysis:
    """Every number of users at every width.

    Expert layers are left out, with a note, where the table does not cover them; a dense layer never is.

    Args:
        model: its layers.
        times: measured.
        steps: {users: iterations}, of `steps_of`.
        bits: widths; all that the table has for every dense layer where none are given.

    Raises:
        NotMeasured: the table lacks a dense layer, a width or an M.
    """
    notes = []
    widths = list(bits) or times.bits(model)
    if not widths:
        raise NotMeasured(nothing_measured(model, times))
    if not bits and (rest := [width for width in SUPPORTED_BITS if width not in widths]):
        words = ", ".join(map(str, rest))
        notes.append(
            f"k = {words} left out, not measured for all layers: `kbit bench kernels --model {model.name} "
            f"--dtype {times.dtype} --bits {words.replace(' ', '')}`"
        )
    pairs = [(users, width) for users in steps for width in widths]
    if model.experts:
        try:
            found = [scenario(model, times, steps[users], users, width, True) for users, width in pairs]
            return Analysis(model.name, tuple(found), tuple(notes))
        except NotMeasured as error:
            names = ", ".join(shape.name for shape in model.experts)
            notes.append(f"expert layers ({names}) left out: {_grouped_reason(times, error)}")
    found = [scenario(model, times, steps[users], users, width) for users, width in pairs]
    return Analysis(model.name, tuple(found), tuple(notes))


def _grouped_reason(times: Times, error: NotMeasured) -> str:
    return f"{error}" if times.grouped else f"there are no grouped rows in {times.dtype}"


def nothing_measured(model: ModelLayers, times: Times) -> str:
    """What to measure where a table has no width for all layers of a model."""
    names = ", ".join(shape.name for shape in model.dense)
    return (
        f"workload: the table has no width for all layers of {model.name} ({names}), {times.dtype}. Measure "
        f"them: {COMMAND} --model {model.name} --dtype {times.dtype} {ALL_ROWS} --json FILE"
    )
