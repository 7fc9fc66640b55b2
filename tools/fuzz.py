"""Multiply random problems by every kernel that may take them, and compare whole results with float64.

    python tools/fuzz.py benchmarks/results/fuzz.json --seconds 300

What fits no test's list of shapes: any N and K, rows by the thousand or none, experts dealt in every way,
widths, codebooks, biases, gates, rows apart in memory, NVFP4 in its layouts and contracts. Half of the k-bit
problems have one-hot activations, whose products are decoded weights to the bit; each is repeated and
compared. A cache of compiled kernels (`kbit compile`) leaves more time to problems.

A problem that takes longer than a minute is a kernel that waits without an end: it is printed, and the run
ends with 2; it ends with 1 if a result was wrong. `--seed` and `--only` repeat a problem that was printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

import kbit
from kbit import nvfp4
from kbit.bench.gpu_timing import describe, environment
from kbit.format.codebook import get_codebook

KERNELS = {
    False: ("dispatch", "stream", "wgmma", "mma", "cublas"),
    True: ("dispatch", "grouped", "resident", "wgmma", "mma"),
}
BY_WEIGHTS = ("wgmma", "mma", "cublas")  # multiply with weights as `dequantize` rounds them
DEDUPS = ("off", "gather", "scatter", "indirect")
MOST_WEIGHTS = 2**25
MOST_PRODUCTS = 2**37
PATIENCE = 60  # seconds
DEALINGS = ("even", "random", "skewed", "one", "few")


@dataclass(frozen=True)
class Problem:
    """A product.

    Attributes:
        seed: of its numbers.
        bits: of a weight; 0: NVFP4.
        dtype: of activations.
        experts: how many; 0 for a single weight.
        n, k, rows: N, K and M, or the rows of all experts.
        dealing: how rows are dealt to experts.
        gated: whether the result is silu(gate) * up.
        bias: whether there is one.
        one_hot: whether activations are.
        symmetric: whether the codebook is.
        stride: from row to row of x, K or more.
    """

    seed: int
    bits: int
    dtype: torch.dtype
    experts: int
    n: int
    k: int
    rows: int
    dealing: str
    gated: bool
    bias: bool
    one_hot: bool
    symmetric: bool
    stride: int


def size_of(pick: random.Random, most: int) -> int:
    """Up to `most`, small as often as large; whole tiles as often as not."""
    size = round(2 ** pick.uniform(0, torch.tensor(most).log2().item()))
    step = pick.choice((1, 1, 8, 16, 64, 128))
    return max(1, min(most, size // step * step if size > step else size))


def problem_of(seed: int) -> Problem:
    """The problem of a seed."""
    pick = random.Random(seed)
    experts = pick.choice((0, 0, size_of(pick, 600)))
    bits = pick.choice((2, 3, 4, 5, 0))
    gated = bits > 0 and pick.random() < 0.3
    k = size_of(pick, 16384)
    n = size_of(pick, max(1, min(16384, MOST_WEIGHTS // (k * max(1, experts)))))
    n = max(32, n // 32 * 32) if gated else n
    rows = pick.choice((size_of(pick, 64), size_of(pick, 8192)))
    rows = min(rows, MOST_PRODUCTS // (n * k)) if pick.random() < 0.98 else 0
    return Problem(
        seed,
        bits=bits,
        dtype=pick.choice((torch.float16, torch.bfloat16)),
        experts=experts,
        n=n,
        k=k,
        rows=rows,
        dealing=pick.choice(DEALINGS),
        gated=gated,
        bias=not gated and not experts and pick.random() < 0.3,
        one_hot=bits > 0 and not gated and pick.random() < 0.5,
        symmetric=pick.random() < 0.7,
        stride=k + pick.choice((0, 0, 1, 8, 64)),
    )


def dealt(problem: Problem) -> torch.Tensor:
    """The expert of each row, int64 [rows], on the CPU."""
    experts, rows, made = problem.experts, problem.rows, torch.Generator().manual_seed(problem.seed)
    if problem.dealing == "even":
        return torch.arange(rows) % experts
    if problem.dealing == "one":
        return torch.randint(experts, (1,), generator=made).expand(rows)
    weights = torch.ones(experts)
    if problem.dealing == "skewed":
        weights = 1 / (torch.randperm(experts, generator=made) + 1.0)
    elif problem.dealing == "few":
        weights = (torch.rand(experts, generator=made) < 0.2).float()
        weights[0] += 0.01
    return torch.multinomial(weights, max(1, rows), replacement=True, generator=made)[:rows]


@dataclass
class Want:
    """A product in float64, and how far off a result may be."""

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

    def wrong(self, run: Callable[[], torch.Tensor]) -> str | None:
        """What is wrong about two runs, or None; what memory held before them is no number."""
        runs = []
        for _ in range(2):
            torch.full_like(self.y, torch.nan, dtype=torch.float16)
            runs.append(run())
        y, again = runs
        if not torch.equal(y, again):
            return f"{int((y != again).sum())} of {y.numel()} numbers differ when repeated"
        off = ~((y.double() - self.y).abs() <= self.bound)
        if bool(off.any()):
            return (
                f"{int(off.sum())} of {y.numel()} numbers are wrong, the first at {off.nonzero()[0].tolist()}"
            )
        return None


Ways = Iterator[tuple[str, Callable[[], torch.Tensor], Want]]


def kbit_ways(problem: Problem, device: torch.device) -> Ways:
    """A k-bit product by dispatch and by every kernel; the weight becomes tiled at the first one."""
    made, eps = torch.Generator(device).manual_seed(problem.seed), torch.finfo(problem.dtype).eps
    codebook = get_codebook("nf", problem.bits)
    codebook[1] *= 1.0 if problem.symmetric else 0.99
    shape = (problem.n, problem.k) if not problem.experts else (problem.experts, problem.n, problem.k)
    w = torch.randn(shape, generator=made, device=device)
    w *= problem.k**-0.5 if problem.gated else 1.0  # products of two sums are to stay below 65504
    q = kbit.quantize(w, problem.bits, codebook=codebook, search=False)
    x = torch.randn(problem.rows, problem.stride, generator=made, device=device).to(problem.dtype)
    x = x[:, : problem.k]
    if problem.one_hot:
        at = torch.randint(problem.k, (problem.rows, 1), generator=made, device=device)
        x.zero_().scatter_(1, at, 1.0)
    bias = None
    if problem.bias:
        bias = torch.randn(problem.n, generator=made, device=device).to(problem.dtype)
    ids = dealt(problem).sort().values.to(device) if problem.experts else None
    sums, of_sums = Want.of(x, kbit.dequantize(q, problem.dtype), ids), problem.k**0.5 * 2.0**-23
    if bias is not None:
        sums.y += bias.double()
    want = tight = sums.within(0.0)
    if not problem.one_hot or bias is not None:
        want = sums.within(eps + of_sums).rounded(problem.dtype)
        tight = sums.within(of_sums).rounded(problem.dtype)
    if problem.gated:
        want = tight = want.silu_and_mul(problem.dtype)
    activation = "silu_and_mul" if problem.gated else None
    if ids is None:
        run = partial(kbit.linear, x, q, bias, activation=activation)
    else:
        offsets = torch.nn.functional.pad(ids.bincount(minlength=problem.experts).cumsum(0), (1, 0)).int()
        run = partial(kbit.grouped_linear, x, q, offsets, activation=activation)
    for kernel in KERNELS[problem.experts > 0] if device.type == "cuda" else ("dispatch",):
        with environment({"KBIT_KERNEL": "" if kernel == "dispatch" else kernel}):
            yield kernel, run, tight if kernel in BY_WEIGHTS else want


def nvfp4_ways(problem: Problem, device: torch.device) -> Ways:
    """An NVFP4 product by every contract and layout; "exact" is the float64 sum, rounded, to the bit."""
    made, dtype, k = torch.Generator(device).manual_seed(problem.seed), problem.dtype, problem.k
    shape = (problem.n, k) if not problem.experts else (problem.experts, problem.n, k)
    w = nvfp4.quantize_nvfp4(torch.randn(shape, generator=made, device=device), search=False)
    x = torch.randn(problem.rows, k, generator=made, device=device).to(dtype)
    a = nvfp4.quantize_nvfp4(x)
    ids = dealt(problem).to(device) if problem.experts else None
    decoded = nvfp4.dequantize_nvfp4(w)
    sums = Want.of(nvfp4.dequantize_nvfp4(a), decoded, ids).within(k**0.5 * 2.0**-23)
    exact = Want(sums.y.float().to(dtype).double(), torch.zeros_like(sums.y))
    for layout in ("nv", "tiled"):
        weight = nvfp4.repack_nvfp4(w, layout)
        for accum in ("exact", "seq16", "tc"):
            if ids is None:
                run = partial(nvfp4.gemm_nvfp4, a, weight, accum, dtype)
            else:
                dedup = DEDUPS[problem.seed % 4]
                run = partial(_nvfp4_experts, x, weight, ids[:, None], dedup, accum)
            yield f"nvfp4 {layout} {accum}", run, exact if accum == "exact" else sums.rounded(dtype)
        if ids is None:
            of_x = Want.of(x, decoded, None).within(torch.finfo(dtype).eps + k**0.5 * 2.0**-23)
            yield f"nvfp4 {layout} W4A16", partial(nvfp4.linear_nvfp4, x, weight), of_x.rounded(dtype)


def _nvfp4_experts(x: torch.Tensor, weight: nvfp4.NVFP4Tensor, ids: torch.Tensor, *how: str) -> torch.Tensor:
    return nvfp4.moe_gemm_nvfp4(x, weight, ids, *how)[:, 0]


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


def fuzz(seeds: range, seconds: float, device: torch.device) -> tuple[Counter[str], list[str]]:
    """Products checked of each kernel, and what was wrong."""
    done, wrong, end = Counter[str](), list[str](), time.monotonic() + seconds
    with Watchdog() as watchdog:
        for seed in seeds:
            if time.monotonic() > end:
                break
            problem = problem_of(seed)
            watchdog.now(f"operands of {problem}")
            for way, run, want in (kbit_ways if problem.bits else nvfp4_ways)(problem, device):
                watchdog.now(f"{way}: {problem}")
                try:
                    words = want.wrong(run)
                except ValueError as error:
                    if "KBIT_KERNEL" not in str(error):
                        raise
                    continue  # the kernel may not take it
                done[way] += 1
                if words:
                    wrong.append(f"{way}: {words}: {problem}")
                    print("WRONG", wrong[-1], flush=True)
    return done, wrong


def main() -> int:
    """Fuzz for some time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", help="JSON for the counts")
    parser.add_argument("--seconds", type=float, default=300, help="for how long")
    parser.add_argument("--seed", type=int, default=0, help="of the first problem; others count up from it")
    parser.add_argument("--only", action="store_true", help="only the problem of this seed")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    given = parser.parse_args()
    seeds = range(given.seed, given.seed + (1 if given.only else 2**31))
    done, wrong = fuzz(seeds, given.seconds, torch.device(given.device))
    for way, count in done.items():
        print(f"{count:7} {way}")
    print(f"{done.total():7} products, {len(wrong)} of them wrong")
    if given.file is not None:
        result = {"machine": describe(given.device), "seed": given.seed, "products": done, "wrong": wrong}
        given.file.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
