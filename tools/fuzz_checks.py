"""What the problems of tools/fuzz.py share: sizes, what is wanted of a result, and a watch over the time."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

PATIENCE = 60  # seconds


def size_of(pick: random.Random, most: int) -> int:
    """Up to `most`, small as often as large; whole tiles as often as not."""
    size = round(2 ** pick.uniform(0, math.log2(most)))
    step = pick.choice((1, 1, 8, 16, 64, 128))
    return max(1, min(most, size // step * step if size > step else size))


@dataclass
class Want:
    """A result in float64, and how far off another may be."""

    y: torch.Tensor
    bound: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, w: torch.Tensor, ids: torch.Tensor | None) -> Want:
        """x [M, K] times w [N, K], or [E, N, K] and the expert of each row; the bound: sums of magnitudes."""
        y = torch.zeros(len(x), w.shape[-2], dtype=torch.float64, device=x.device)
        want = cls(y, torch.zeros_like(y))
        if ids is None:
            w, ids = w[None], torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for expert in ids.unique().tolist():
            mine = ids == expert
            rows, weight = x[mine].double(), w[expert].double()
            want.y[mine] = rows @ weight.T
            want.bound[mine] = rows.abs() @ weight.abs().T
        return want

    def within(self, slack: float) -> Want:
        """With a bound of so many magnitudes."""
        return Want(self.y, self.bound * slack)

    def rounded(self, dtype: torch.dtype) -> Want:
        """For a result that is rounded to `dtype`."""
        info = torch.finfo(dtype)
        return Want(self.y, self.bound + self.y.abs() * info.eps + info.smallest_normal * info.eps)

    def silu_and_mul(self, dtype: torch.dtype) -> Want:
        """For gates and ups, each step of which is rounded."""
        (gate, up), (of_gate, of_up), eps = self.y.chunk(2, 1), self.bound.chunk(2, 1), torch.finfo(dtype).eps
        y = torch.nn.functional.silu(gate) * up
        return Want(y, 1.2 * of_gate * up.abs() + gate.abs() * of_up + 4 * eps * y.abs() + eps)

    def off(self, y: torch.Tensor) -> str | None:
        """What is wrong about a result, or None; where no number is wanted, there is to be none."""
        if y.shape != self.y.shape:
            return f"the result is {list(y.shape)}, not {list(self.y.shape)}"
        right = (y.double() - self.y).abs() <= self.bound
        wrong = ~(right | (y.double() == self.y) | (y.isnan() & self.y.isnan()))
        if bool(wrong.any()):
            first = wrong.nonzero()[0].tolist()
            return f"{int(wrong.sum())} of {y.numel()} numbers are wrong, the first at {first}"
        return None


Results = torch.Tensor | tuple[torch.Tensor, ...]
Run = Callable[[], Results]
# A name, what computes, and what is wanted of each result.
Ways = Iterator[tuple[str, Run, tuple[Want, ...]]]


def wrong(run: Run, wants: tuple[Want, ...]) -> str | None:
    """What is wrong about two runs, or None; what memory held before them is no number."""
    runs: list[tuple[torch.Tensor, ...]] = []
    for _ in range(2):
        made = runs[0] if runs else tuple(want.y.half() for want in wants)
        for one in made:
            if one.is_floating_point():
                torch.full_like(one, torch.nan)
        results = run()
        runs.append(results if isinstance(results, tuple) else (results,))
    for y, again, want in zip(*runs, wants, strict=True):
        same = torch.eq(y, again) | (y.isnan() & again.isnan())
        if not bool(same.all()):
            return f"{int((~same).sum())} of {y.numel()} numbers differ when repeated"
        if words := want.off(y):
            return words
    return None


class Watchdog:
    """Ends the process when a product takes too long: nobody else could, for it waits for the device."""

    def __init__(self) -> None:
        """Nothing is watched yet."""
        self._words, self._since, self._over = "", time.monotonic(), threading.Event()

    def __enter__(self) -> Watchdog:
        """Begin to watch."""
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        """Watch no longer."""
        self._over.set()

    def now(self, words: str) -> None:
        """Say what is under way."""
        self._words, self._since = words, time.monotonic()

    def _watch(self) -> None:
        while not self._over.wait(1):
            if time.monotonic() - self._since > PATIENCE:
                print(f"HANGS for {PATIENCE} s: {self._words}", flush=True)
                os._exit(2)
