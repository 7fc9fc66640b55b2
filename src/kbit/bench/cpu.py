"""`kbit bench cpu`: packed weights against torch's 16- and 32-bit linear, and the quantizers' speed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

import kbit.ops as ops
from kbit.backends import cpu
from kbit.bench import cpu_timing
from kbit.bench.machine import last_level_cache_bytes
from kbit.format import SUPPORTED_BITS, QuantizedTensor, get_codebook
from kbit.format.codebook import midpoints
from kbit.quantizers.scale_search import WINDOWS

# (in-features, out-features)
LARGE = (4096, 14336)
SHAPES: dict[str, tuple[int, int]] = {
    "llama-8b up": LARGE,
    "smollm2 q, o": (576, 576),
    "smollm2 up": (576, 1536),
    "smollm2 down": (1536, 576),
    "smollm2 head": (576, 49152),
}


@dataclass(frozen=True)
class LinearRow:
    """One measurement of y = x @ W^T: `kernel` is an instruction set, or torch's dtype."""

    shape: str
    in_features: int
    out_features: int
    rows: int
    kernel: str
    bits: int | None
    ms: float
    spread: float
    weight_gb_s: float
    vs_bfloat16: float
    vs_float32: float


@dataclass(frozen=True)
class QuantizeRow:
    """Speed of one quantizer on one instruction set."""

    isa: str
    bits: int
    search: bool
    million_weights_s: float


def instruction_sets() -> list[str]:
    """Those this machine runs, fastest first; the reference backend alone where no kernels are built."""
    return cpu.supported_isas() if cpu.available() else []


def _rotate(make: Callable[[], object], nbytes: int) -> list:
    return [make() for _ in range(cpu_timing.copies_needed(nbytes, last_level_cache_bytes()))]


def _packed_copies(w: torch.Tensor, bits: int) -> list[QuantizedTensor]:
    q = ops.quantize(w, bits=bits, search=False)
    return _rotate(lambda: replace(q, packed=q.packed.clone(), absmax=q.absmax.clone()), q.nbytes)


def _torch_call(copies: list[torch.Tensor], x: torch.Tensor) -> Callable[[int], object]:
    return lambda index: F.linear(x, copies[index % len(copies)])


def _packed_call(copies: list[QuantizedTensor], x: torch.Tensor, isa: str) -> Callable[[int], object]:
    out = torch.empty(x.shape[0], copies[0].shape[0], dtype=x.dtype)

    def call(index: int) -> None:
        q = copies[index % len(copies)]
        cpu.linear(x, q.packed, q.absmax, q.codebook, q.scale, None, q.shape[-1], out, isa=isa)

    return call


def linear_rows(
    shape: str, rows: Iterable[int], bits: Iterable[int] = SUPPORTED_BITS, repeats: int = 9
) -> Iterator[LinearRow]:
    """Measure one shape; yields a row per kernel, width and number of tokens as it goes.

    Args:
        shape: a name in `SHAPES`.
        rows: numbers of tokens M.
        bits: widths.
        repeats: timed calls of each arm.
    """
    in_features, out_features = SHAPES[shape]
    w = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
    float32 = _rotate(w.clone, w.nbytes)
    bfloat16 = _rotate(lambda: w.bfloat16(), w.nbytes // 2)
    packed = {width: _packed_copies(w, width) for width in bits}
    for count in rows:
        x32 = torch.randn(count, in_features)
        x16 = x32.bfloat16()
        calls: dict[tuple[str, int | None], Callable[[int], object]] = {
            ("torch float32", None): _torch_call(float32, x32),
            ("torch bfloat16", None): _torch_call(bfloat16, x16),
        }
        for isa in instruction_sets():
            for width, copies in packed.items():
                calls[isa, width] = _packed_call(copies, x16, isa)
        sizes = {"torch float32": w.nbytes, "torch bfloat16": w.nbytes // 2}
        yield from _compare(shape, count, calls, packed, sizes, repeats)


def _compare(shape, count, calls, packed, sizes, repeats) -> Iterator[LinearRow]:
    in_features, out_features = SHAPES[shape]
    with torch.inference_mode():
        results = cpu_timing.measure(calls, repeats)
    base16 = results["torch bfloat16", None].median_ms
    base32 = results["torch float32", None].median_ms
    for (kernel, width), result in results.items():
        nbytes = sizes[kernel] if width is None else packed[width][0].nbytes
        yield LinearRow(
            shape,
            in_features,
            out_features,
            count,
            kernel,
            width,
            round(result.median_ms, 4),
            round(result.spread, 3),
            round(nbytes / result.median_ms / 1e6, 2),
            round(base16 / result.median_ms, 3),
            round(base32 / result.median_ms, 3),
        )


def _ignoring_index(run: Callable[[], object]) -> Callable[[int], object]:
    return lambda index: run()


def quantize_rows(repeats: int = 7) -> Iterator[QuantizeRow]:
    """Speed of the plain and the searching quantizer on a large bfloat16 weight."""
    in_features, out_features = LARGE
    w = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    for isa in instruction_sets():
        for bits in SUPPORTED_BITS:
            levels = get_codebook("nf", bits)
            for window in (None, WINDOWS[bits]):
                run = functools.partial(cpu.quantize, w, levels, midpoints(levels), bits, window, isa)
                result = cpu_timing.measure({isa: _ignoring_index(run)}, repeats)[isa]
                speed = w.numel() / result.median_ms / 1e3
                yield QuantizeRow(isa, bits, window is not None, round(speed, 1))
