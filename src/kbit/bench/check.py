"""`kbit bench check`: is the dispatched path anywhere slower than 16-bit cuBLAS by more than it may be?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kbit.bench import targets
from kbit.bench.kernel_rows import KernelRow, compare


@dataclass(frozen=True)
class Verdict:
    """One problem: its speed-up over the 16-bit baseline, and the least it may have."""

    shape: str
    rows: int
    bits: int
    dtype: str
    us: float
    baseline_us: float
    bound: float

    @property
    def speedup(self) -> float:
        """Time of the baseline / our time."""
        return self.baseline_us / self.us

    @property
    def holds(self) -> bool:
        """Whether the bound is kept."""
        return self.speedup >= self.bound

    def __str__(self) -> str:
        return (
            f"{self.shape} M={self.rows} k={self.bits} {self.dtype}: {self.us:.1f} us against "
            f"{self.baseline_us:.1f} us, {self.speedup:.3f} < {self.bound:g}"
        )


def verdicts(rows: Iterable[KernelRow]) -> list[Verdict]:
    """One for every shape, M, width and dtype that has a baseline."""
    return [
        Verdict(
            item.baseline.shape,
            item.baseline.rows,
            item.bits,
            item.baseline.dtype,
            item.dispatched.us,
            item.baseline.us,
            targets.never_slower(item.baseline.shape, item.baseline.rows, item.bits),
        )
        for item in compare(rows)
    ]
