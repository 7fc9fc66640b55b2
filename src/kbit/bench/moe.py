"""`kbit bench moe`: products with many experts, against cuBLAS's bmm and torch's grouped matrix product.

E experts have M rows each, for bmm wants equal groups. Weights are cold, see `copies_of`. The whole layer
around the products is in `kbit.bench.moe_layer`, the router in `kbit.bench.moe_router`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

import kbit.ops as ops
from kbit.bench import gpu_timing
from kbit.bench.correctness import require_close
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.kernel_rows import BASELINE, DISPATCHED, OURS
from kbit.bench.kernels import packed_copies
from kbit.format import QuantizedTensor

# name -> (in-features, out-features): an expert of Qwen3-Coder-Next.
SHAPES = {"gu": (2048, 512), "dn": (512, 2048)}
BMM, GROUPED = "bmm", "grouped_mm"
_CHECKED_ROWS = 64
_FREE = 0.3  # of the free memory, for the copies of one arm


@dataclass(frozen=True)
class MoeRow:
    """One measurement.

    `problem` is such as "gu, 128 experts", "layer, zipf" or "router, 8 of 128"; `rows` are those of each
    expert, or the tokens of a layer or router; `read_bytes` the weights of the experts that have any, or the
    router's. `us` is a median, `spread` (max - min) / median.
    """

    problem: str
    rows: int
    bits: int | None
    kernel: str
    kind: str
    us: float
    spread: float
    copies: int
    read_bytes: int


def baselines(rows: Sequence[MoeRow]) -> dict[tuple[str, int], MoeRow]:
    """(problem, rows) -> its fastest 16-bit row."""
    best: dict[tuple[str, int], MoeRow] = {}
    for row in rows:
        key = row.problem, row.rows
        if row.kind == BASELINE and (key not in best or row.us < best[key].us):
            best[key] = row
    return best


def as_json(rows: Sequence[MoeRow]) -> list[dict[str, Any]]:
    """Rows as JSON objects, with GB/s of weights and the ratios to bmm and the fastest 16-bit path."""
    best = baselines(rows)
    bmm = {(row.problem, row.rows): row.us for row in rows if row.kernel == BMM}
    items = []
    for row in rows:
        key = row.problem, row.rows
        item = asdict(row) | {"us": round(row.us, 3), "spread": round(row.spread, 3)}
        item["gb_s"] = round(row.read_bytes / row.us / 1e3, 1)
        item["vs_bmm"] = round(bmm[key] / row.us, 3) if key in bmm else None
        item["vs_best_16_bit"] = round(best[key].us / row.us, 3) if key in best else None
        items.append(item)
    return items


def copies_of(nbytes: int, read_bytes: int, device: torch.device) -> int:
    """How many copies of a weight leave it cold: what is read until one's turn comes again is five L2 caches.

    In a model, all other layers run before the same one runs again. Two on a CPU, where nothing is measured.

    Args:
        nbytes: of a copy.
        read_bytes: what a call reads of it.
        device: where.
    """
    if device.type != "cuda":
        return 2
    wanted = -(-gpu_timing.CACHE_FACTOR * gpu_timing.l2_bytes() // max(1, read_bytes))
    free, _ = torch.cuda.mem_get_info(device)
    return max(2, min(max(gpu_timing.MIN_COPIES, wanted), int(_FREE * free) // max(1, nbytes)))


# -- grouped products ----------------------------------------------------------------------------------------


@dataclass
class GroupedWeights:
    """Cold copies of E experts' weights [E, N, K]."""

    dense: list[torch.Tensor]
    packed: dict[int, list[QuantizedTensor]]


def make_grouped(
    shape: tuple[int, int],
    experts: int,
    bits: Sequence[int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> GroupedWeights:
    """Random weights; `shape` is (in-features, out-features)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (experts, shape[1], shape[0])
    w = torch.randn(size, generator=generator, device=device).to(dtype)

    def copies(nbytes: int) -> int:
        return copies_of(nbytes, nbytes, device)

    dense = [w.clone() for _ in range(copies(w.nbytes))]
    return GroupedWeights(dense, {width: packed_copies(w, width, copies) for width in bits})


# Kernel, width, kind, bytes of the weights that a call reads.
Label = tuple[str, int | None, str, int]


def grouped_arms(weights: GroupedWeights, x: torch.Tensor) -> dict[Label, Arm]:
    """The arms of one problem; x is [E, M, K]."""
    experts, each, _ = x.shape
    flat = x.flatten(0, 1)
    offsets = torch.arange(experts + 1, device=x.device, dtype=torch.int32) * each
    ends, dense = offsets[1:].contiguous(), [w.transpose(-2, -1) for w in weights.dense]
    nbytes = weights.dense[0].nbytes
    arms: dict[Label, Arm] = {
        (BMM, None, BASELINE, nbytes): Arm([functools.partial(torch.bmm, x, w) for w in dense]),
    }
    if x.dtype == torch.bfloat16:  # in float16 it asks the device for offsets, which no graph can record
        calls = [functools.partial(torch._grouped_mm, flat, w, offs=ends) for w in dense]
        arms[GROUPED, None, BASELINE, nbytes] = Arm(calls)
    for bits, copies in weights.packed.items():
        ours = [functools.partial(ops.grouped_linear, flat, q, offsets) for q in copies]
        arms[DISPATCHED, bits, OURS, copies[0].nbytes] = Arm(ours)
    return arms


@torch.no_grad()
def _check_grouped(weights: GroupedWeights, x: torch.Tensor, arms: dict[Label, Arm]) -> None:
    """Compare our arms with float32 arithmetic; raises ValueError where they compute something else."""
    some = x[:, : -(-_CHECKED_ROWS // len(x))].float()
    for (kernel, bits, _, _), arm in arms.items():
        if bits is None:
            continue
        w = ops.dequantize(weights.packed[bits][0], x.dtype).float()
        expected = torch.bmm(some, w.transpose(-2, -1))
        found = arm.calls[0]()
        assert isinstance(found, torch.Tensor)
        y = found.view(*x.shape[:2], -1)[:, : some.shape[1]]
        require_close(f"bench moe: {kernel}, k={bits}, {tuple(x.shape)}", y, expected)


def grouped_rows(
    name: str,
    experts: int,
    counts: Sequence[int],
    bits: Sequence[int],
    repeats: int,
    timer: Timer,
    dtype: torch.dtype,
) -> Iterator[MoeRow]:
    """Measure one shape with so many experts; yields the rows of each M as they are done."""
    device = torch.device("cuda")
    weights = make_grouped(SHAPES[name], experts, bits, device, dtype)
    for each in counts:
        x = torch.randn(experts, each, SHAPES[name][0], device=device).to(dtype)
        arms = grouped_arms(weights, x)
        _check_grouped(weights, x, arms)
        yield from measured(f"{name}, {experts} experts", each, arms, repeats, timer)


def measured(problem: str, rows: int, arms: dict[Label, Arm], repeats: int, timer: Timer) -> Iterator[MoeRow]:
    """Time the arms of a problem."""
    for label, timing in timer(arms, repeats).items():
        kernel, bits, kind, read = label
        copies = len(arms[label].calls)
        yield MoeRow(problem, rows, bits, kernel, kind, timing.us, timing.spread, copies, read)
