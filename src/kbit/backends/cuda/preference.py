"""Which kernel takes a product of one weight: legality, measurements, estimates.

`decide` takes the fastest by measurement where a table has the problem (`kbit.backends.cuda.tables`), else by
estimate. KBIT_KERNEL=stream (one weight), grouped or resident (experts), wgmma, mma or cublas forces a
kernel; where that may not take a problem, the error says why.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from kbit.backends import environment
from kbit.backends.cuda import mma, operands, stream, tables, wgmma, wgmma_config
from kbit.backends.cuda.weight_shape import WeightShape

KERNELS = ("stream", "grouped", "resident", "wgmma", "mma", "cublas")
# On Hopper, tokens up to which stream is faster: 4096 x 14336 by 8 tokens on an H200 14.4 us, wgmma 15.4; by
# 16 tokens 19.9 and 15.1.
FEW_TOKENS = 8
# Tokens up to which it runs if it is forced to, 16 at a time.
STREAM_TOKENS = 64
# Off Hopper, tokens up to which mma.cu is faster than decoding in front of cuBLAS. Estimates: 4096 x 14336 by
# 128 tokens on an H200 56.5 us and 79, by 256 tokens 102 and 90, since cuBLAS has wgmma there. It has what is
# faster than mma.sync on a data center's Blackwell, too, but elsewhere not.
_MMA_TOKENS, _MMA_TOKENS_BLACKWELL = 1024, 128
# On Hopper, small weights for many tokens: decoding costs little and cuBLAS fills the machine better. 2048 x
# 512 by 4096 tokens on an H200: wgmma 19.7 us, cuBLAS alone 13.2.
_SMALL_WEIGHTS, _MANY_TOKENS = 2**21, 2048
# Where by estimate a row's launch falls further behind for fewer tokens than were measured, estimates choose.
_MOST_BEHIND = 1.1


@dataclass(frozen=True)
class Choice:
    """The kernel for a problem, and why it was taken.

    Attributes:
        kernel: one of `KERNELS`.
        plan: the launch if the kernel is wgmma, else None: the others plan theirs when they are called.
        row: the row of a table of measurements that decided; None if an estimate or the user did.
        file: the table's file; empty without a row.
        forced: whether KBIT_KERNEL named the kernel.
    """

    kernel: str
    plan: wgmma.Plan | None = None
    row: tables.Row | None = None
    file: str = ""
    forced: bool = False

    @property
    def why(self) -> str:
        """ "by estimate", say, in words for `kbit.explain`."""
        if self.forced:
            return "forced by KBIT_KERNEL"
        if self.row is None:
            return "by estimate"
        words = f"by table {Path(self.file).name}, measured {self.row.us:g} us"
        if self.row.runner_up is not None:
            words += f" ({self.row.runner_up} {self.row.runner_up_us:g} us)"
        return f"{words} at M={self.row.m}"


def decide(m: int, dtype: torch.dtype, weight: WeightShape, known: tuple[tables.Table, ...] = ()) -> Choice:
    """The kernel for a problem: what KBIT_KERNEL forces, or the fastest by the first table that has it.

    Raises:
        ValueError: KBIT_KERNEL names no kernel, or one that may not take this problem.
    """
    return decided(environment.kernel(), m, dtype, weight, known)


@functools.lru_cache(maxsize=4096)
def decided(
    named: str | None,
    m: int,
    dtype: torch.dtype,
    weight: WeightShape,
    known: tuple[tables.Table, ...],
) -> Choice:
    """`decide` with what KBIT_KERNEL is; the same errors."""
    refusals = refusals_of(m, dtype, weight.out_features, weight.gated, weight.device.arch)
    forced = forced_kernel(named, refusals)
    name = next((name for name, one in tables.DTYPES.items() if one == dtype), None)
    for table in known if name else ():
        row = table.row(m, tables.Problem.of(weight, str(name)))
        if row is None or refusals[row.kernel] is not None or forced not in (None, row.kernel):
            continue
        if row.tiling is None:
            return Choice(row.kernel, None, row, table.file, bool(forced))
        plan = _fitted(row.tiling, row.m, table.tokens, m, weight)
        if plan is None:
            continue
        if _behind(plan.tiling, m, weight) > _MOST_BEHIND * _behind(row.tiling, row.m, weight):
            return Choice(row.kernel, wgmma.plan(m, weight), forced=bool(forced))
        return Choice(row.kernel, plan, row, table.file, bool(forced))
    kernel = forced or _estimated(refusals, m, weight.out_features, weight.in_features, weight.device.arch)
    return Choice(kernel, wgmma.plan(m, weight) if kernel == "wgmma" else None, forced=bool(forced))


def _fitted(
    tiling: wgmma_config.Tiling, measured: int, competed: tuple[int, ...], m: int, weight: WeightShape
) -> wgmma.Plan | None:
    """The launch of a row's kind with the fewest tokens that makes as many blocks of m tokens as the row's.

    72 tokens take a block of 80, where a row for 96 says 96. What competed and would have made as many blocks
    of the tokens that were measured, too, is left out: it lost.

    Returns:
        None if the row's own launch may not take the problem.
    """

    def as_many(tokens: int, size: int) -> bool:
        return -(-tokens // size) == -(-tokens // tiling.tokens)

    plans = wgmma.candidates(m, weight)
    kind = {
        plan.tiling.tokens: plan for plan in plans if plan.tiling._replace(tokens=tiling.tokens) == tiling
    }
    lost = {size for size in competed if as_many(measured, size)} - {tiling.tokens}
    fitting = [size for size in kind if as_many(m, size) and size not in lost]
    return kind[min(fitting)] if tiling.tokens in kind else None


def _behind(tiling: wgmma_config.Tiling, m: int, weight: WeightShape) -> float:
    """Estimated time of a launch over that of the estimated best; inf if it may not take the problem.

    Tiles of 256 tokens suit 1024 tokens, but waste a quarter of the work on 576. For a launch that was
    measured as the fastest, this ratio is the estimate's error, much the same for somewhat fewer tokens.
    """
    costs, plan = wgmma.candidates(m, weight), wgmma.plan_of(tiling, m, weight)
    return math.inf if plan is None else costs[plan] / min(costs.values())


def choose(m: int, dtype: torch.dtype, out_features: int, in_features: int, gated: bool, arch: str) -> str:
    """The kernel for a problem that no table has: the one that KBIT_KERNEL names, or the fastest by estimate.

    Raises:
        ValueError: see `decide`.
    """
    refusals = refusals_of(m, dtype, out_features, gated, arch)
    return forced_kernel(environment.kernel(), refusals) or _estimated(
        refusals, m, out_features, in_features, arch
    )


def _estimated(
    refusals: dict[str, str | None], m: int, out_features: int, in_features: int, arch: str
) -> str:
    many = m >= _MANY_TOKENS and out_features * in_features <= _SMALL_WEIGHTS
    if refusals["wgmma"] is None:
        return "stream" if m <= FEW_TOKENS and refusals["stream"] is None else "cublas" if many else "wgmma"
    if refusals["stream"] is None and m <= stream.TOKENS[-1]:
        return "stream"
    return "mma" if refusals["mma"] is None and m <= most_by_mma(arch) else "cublas"


def most_by_mma(arch: str) -> int:
    """Tokens up to which mma is faster by estimate than decoding in front of cuBLAS; not for Hopper."""
    return _MMA_TOKENS_BLACKWELL if arch.startswith(("10", "11")) else _MMA_TOKENS


def forced_kernel(named: str | None, refusals: dict[str, str | None]) -> str | None:
    """The kernel that KBIT_KERNEL names, if it is among those that a problem may have, else None.

    Args:
        named: what KBIT_KERNEL is.
        refusals: why each of the problem's kernels may not take it, or None.

    Raises:
        ValueError: it names no kernel, or one that is refused.
    """
    if not named:
        return None
    if named not in KERNELS:
        raise ValueError(f"KBIT_KERNEL is {named!r}; known: {', '.join(KERNELS)}.")
    if named not in refusals:  # stream is for one weight, grouped for experts
        return None
    if (reason := refusals[named]) is not None:
        raise ValueError(f"KBIT_KERNEL={named} cannot run this: {reason}. Unset it, or set another.")
    return named


def reasons(
    m: int, dtype: torch.dtype, weight: WeightShape, known: tuple[tables.Table, ...] = ()
) -> dict[str, str]:
    """Every kernel, with words on whether it is taken, could be, or may not; why; and the taken one's launch.

    Raises:
        ValueError: see `decide`.
    """
    choice = decide(m, dtype, weight, known)
    refusals, words = refusals_of(m, dtype, weight.out_features, weight.gated, weight.device.arch), {}
    for kernel, refusal in refusals.items():
        words[kernel] = f"taken {choice.why}" if kernel == choice.kernel else refusal or "could take it"
    if choice.kernel == "stream":
        plan = stream.plan(min(m, stream.TOKENS[-1]), weight)
        launches = -(-m // stream.TOKENS[-1])
        words["stream"] += f": {launches} x {plan.grid} blocks of {plan.workers} + 1 warps"
    elif choice.kernel == "mma":
        config, (by_rows, by_tokens, parts) = mma.plan(m, weight)
        words["mma"] += f": {by_rows * by_tokens} blocks of {config.rows} rows by {config.tokens} tokens"
        words["mma"] += f" for each of {parts} parts of K" if parts > 1 else ""
    elif choice.plan is not None:
        tiling = choice.plan.tiling
        words["wgmma"] += f": {choice.plan.grid} blocks of {tiling.rows} rows by {tiling.tokens} tokens"
        words["wgmma"] += " in pairs" if tiling.multicast else f" in clusters of {tiling.cluster}"
        words["wgmma"] += ", two teams each" if choice.plan.teams == 2 else ""
    return words


@functools.lru_cache(maxsize=4096)
def refusals_of(
    m: int, dtype: torch.dtype, out_features: int, gated: bool, arch: str
) -> dict[str, str | None]:
    """Why each kernel may not take a problem, or None."""
    at_once = min(m, stream.TOKENS[-1]) if m <= STREAM_TOKENS else m
    return {
        "stream": stream.refusal(at_once, dtype, out_features, gated),
        "wgmma": wgmma.arch_refusal(arch) or operands.refusal(dtype, out_features, gated),
        "mma": mma.refusal(m, dtype, out_features, gated),
        "cublas": None,
    }
