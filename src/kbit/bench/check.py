"""`kbit bench check`: is the dispatched path anywhere slower than 16-bit cuBLAS by more than it may be?"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from kbit.bench import targets
from kbit.bench.kernel_rows import Comparison, KernelRow, compare


@dataclass(frozen=True)
class Verdict:
    """One problem at one width, and the least speed-up that its dispatched path may have."""

    problem: Comparison
    bound: float

    @property
    def speedup(self) -> float:
        """Time of the 16-bit baseline / time of the dispatched path."""
        return self.problem.speedup(self.problem.dispatched)

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.speedup >= self.bound

    def __str__(self) -> str:
        base, ours = self.problem.baseline, self.problem.dispatched
        return (
            f"{base.shape} M={base.rows} k={self.problem.bits} {base.dtype}: {ours.us:.1f} us against "
            f"{base.us:.1f} us, {self.speedup:.3f} < {self.bound:g}"
        )


def of_problems(
    rows: Iterable[KernelRow],
    shapes: Collection[str] | None,
    tokens: Collection[int] | None,
    bits: Collection[int],
    dtypes: Collection[str],
) -> list[KernelRow]:
    """The rows of some problems, 16-bit baselines among them; `shapes` and `tokens` None for all."""
    return [
        row
        for row in rows
        if (shapes is None or row.shape in shapes)
        and (tokens is None or row.rows in tokens)
        and (row.bits is None or row.bits in bits)
        and row.dtype in dtypes
    ]


def verdicts(rows: Iterable[KernelRow]) -> list[Verdict]:
    """One for every shape, M, width and dtype that has a baseline."""
    return [
        Verdict(item, targets.never_slower(item.baseline.shape, item.baseline.rows, item.bits))
        for item in compare(rows)
    ]
