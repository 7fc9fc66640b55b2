"""`kbit bench kernels`: every way to multiply by one weight, against 16-bit cuBLAS in the same run.

Arms of a problem (shape, M, dtype): F.linear on a dense weight, and per width `kbit.linear` as it dispatches,
`kbit.linear` under other settings (`variants`), dequantize + F.linear, and the peers of `kbit.bench.peers`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

import kbit.ops as ops
from kbit.backends.cuda.tables import DTYPES
from kbit.bench import gpu_timing, peers
from kbit.bench.correctness import require_close
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.kernel_rows import BASELINE, DISPATCHED, OURS, PEER, KernelRow
from kbit.bench.shapes import LayerShape
from kbit.format import SUPPORTED_BITS, QuantizedTensor

DEVICE = "cuda"
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64)
CUBLAS, DEQUANTIZE = "cublas", "dq+cublas"
CHECKED_ROWS = 16


@dataclass(frozen=True)
class Plan:
    """What to measure. `variants` are KBIT_* settings, each of them one more arm of ours."""

    rows: Sequence[int] = DECODE_ROWS
    bits: Sequence[int] = SUPPORTED_BITS
    dtype: str = "fp16"
    repeats: int = gpu_timing.DEFAULT_REPEATS
    timer: Timer = gpu_timing.measure
    variants: Sequence[dict[str, str]] = ()
    dequantize: bool = True
    with_peers: bool = True


@dataclass
class Weights:
    """Cold copies of one shape's weight for every arm, and why a peer has none."""

    dense: list[torch.Tensor]
    packed: dict[int, list[QuantizedTensor]]
    peers: dict[tuple[str, int], list[peers.PeerWeight]] = field(default_factory=dict)
    absent: dict[str, list[str]] = field(default_factory=dict)

    def note(self, peer: str, reason: str) -> None:
        """Remember once why a peer is not in a row."""
        reasons = self.absent.setdefault(peer, [])
        if reason not in reasons:
            reasons.append(reason)


def packed_copies(w: torch.Tensor, bits: int, copies: Callable[[int], int]) -> list[QuantizedTensor]:
    """A quantized weight as often as `copies` says for its bytes.

    The objects are made from scratch: copies of one would share its tiles, and so stay warm.
    """
    q = ops.quantize(w, bits=bits, search=False)
    return [
        QuantizedTensor(q.packed.clone(), q.absmax.clone(), q.codebook, q.scale, q.bits, q.shape)
        for _ in range(copies(q.nbytes))
    ]


def make_weights(shape: LayerShape, plan: Plan, absent: dict[str, list[str]] | None = None) -> Weights:
    """Random weights of a shape on the current GPU, in as many copies as each arm rotates."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    size = (shape.out_features, shape.in_features)
    w = torch.randn(size, generator=generator, device=DEVICE).to(DTYPES[plan.dtype])
    dense = [w.clone() for _ in range(gpu_timing.cold_copies(w.nbytes))]
    weights = Weights(dense, {bits: packed_copies(w, bits, gpu_timing.cold_copies) for bits in plan.bits})
    weights.absent = {} if absent is None else absent
    for peer in peers.PEERS if plan.with_peers else ():
        for bits in plan.bits:
            made = peers.build(peer, w, bits, gpu_timing.cold_copies)
            if isinstance(made, str):
                weights.note(peer.name, made)
            else:
                weights.peers[peer.name, bits] = made
    return weights


def activations(shape: LayerShape, count: int, plan: Plan) -> torch.Tensor:
    """Random x [count, K]."""
    return torch.randn(count, shape.in_features, device=DEVICE).to(DTYPES[plan.dtype])


# What an arm's row is known by: kernel, width, kind and bytes of one copy.
Label = tuple[str, int | None, str, int]


def decode_and_multiply(x: torch.Tensor, q: QuantizedTensor) -> torch.Tensor:
    """x @ W^T by cuBLAS on a decoded weight."""
    return F.linear(x, ops.dequantize(q, x.dtype))


def variant_name(settings: dict[str, str]) -> str:
    """ "kbit KERNEL=stream" for {"KBIT_KERNEL": "stream"}."""
    return " ".join(
        [DISPATCHED, *(f"{name.removeprefix('KBIT_')}={value}" for name, value in settings.items())]
    )


def make_arms(weights: Weights, x: torch.Tensor, plan: Plan) -> dict[Label, Arm]:
    """The arms of one problem; x is [M, K]."""
    dense = weights.dense
    arms: dict[Label, Arm] = {
        (CUBLAS, None, BASELINE, dense[0].nbytes): Arm([functools.partial(F.linear, x, w) for w in dense])
    }
    for bits, copies in weights.packed.items():
        nbytes = copies[0].nbytes
        calls = [functools.partial(ops.linear, x, q) for q in copies]
        arms[DISPATCHED, bits, OURS, nbytes] = Arm(calls)
        for settings in plan.variants:
            arms[variant_name(settings), bits, OURS, nbytes] = Arm(calls, settings)
        if plan.dequantize:
            decoding = [functools.partial(decode_and_multiply, x, q) for q in copies]
            arms[DEQUANTIZE, bits, OURS, nbytes] = Arm(decoding)
    for (name, bits), made in weights.peers.items():
        reason = peers.try_call(made[0], x)
        if reason is not None:
            weights.note(name, reason)
            continue
        calls = [functools.partial(weight.call, x) for weight in made]
        arms[name, bits, PEER, made[0].nbytes] = Arm(calls)
    return arms


@torch.no_grad()
def _check_results(shape: LayerShape, x: torch.Tensor, weights: Weights, plan: Plan) -> None:
    """Compare some rows of each of our arms with float32 arithmetic.

    Raises:
        ValueError: a kernel computes something else.
    """
    some = torch.linspace(0, x.shape[0] - 1, min(CHECKED_ROWS, x.shape[0]), device=x.device).long()
    for bits, (q, *_) in weights.packed.items():
        expected = x[some].float() @ ops.dequantize(q, x.dtype).float().T
        for settings in ({}, *plan.variants):
            with gpu_timing.environment(settings):
                y = ops.linear(x, q)[some]
            size = f"{shape.in_features}x{shape.out_features}"
            problem = f"{shape.name} ({size}) at M={x.shape[0]}, k={bits}, {plan.dtype}"
            require_close(f"bench: {variant_name(settings)}", y, expected, problem)


def shape_rows(
    shape: LayerShape, plan: Plan, absent: dict[str, list[str]] | None = None
) -> Iterator[KernelRow]:
    """Measure one shape; yields the rows of each M as they are done, in the order of the arms.

    Args:
        shape: a dense shape.
        plan: what to measure.
        absent: filled with {peer: why it is missing from rows}.
    """
    weights = make_weights(shape, plan, absent)
    gpu_timing.rest()
    for count in plan.rows:
        x = activations(shape, count, plan)
        _check_results(shape, x, weights, plan)
        arms = make_arms(weights, x, plan)
        for label, timing in plan.timer(arms, plan.repeats).items():
            kernel, bits, kind, nbytes = label
            yield KernelRow(
                model=shape.model,
                shape=shape.name,
                in_features=shape.in_features,
                out_features=shape.out_features,
                count=shape.count,
                rows=count,
                bits=bits,
                dtype=plan.dtype,
                kernel=kernel,
                kind=kind,
                us=timing.us,
                spread=timing.spread,
                copies=len(arms[label].calls),
                weight_bytes=nbytes,
            )
    del weights
    torch.cuda.empty_cache()
