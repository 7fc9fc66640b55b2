"""The CPU backend: C++ kernels for AVX-512, AVX2, NEON and any other CPU, chosen when called.

Functions take contiguous CPU tensors that the op layer has checked. Each takes `isa=` to force an instruction
set (tests, benchmarks); the environment variable KBIT_CPU_ISA forces it for the whole process. Threads are
torch's (`torch.set_num_threads`). Results do not depend on their number, but where torch multiplies panels.
"""

from __future__ import annotations

import functools
import importlib
import os
from types import ModuleType

import torch

from kbit.backends.cpu.panels import linear_by_panels, panels_win
from kbit.backends.dtype_codes import ABSMAX_DTYPES, DTYPES
from kbit.format.codebook import bits_of
from kbit.format.errors import NonFiniteWeightError
from kbit.format.reference import blocks_of

_native: ModuleType | None = None
_reason: str | None = None
try:
    _native = importlib.import_module("kbit._cpu")
except ImportError as error:
    _reason = (
        f"the compiled extension kbit._cpu is missing ({error}). Reinstall kbit with a C++17 compiler "
        "and Python's headers present; until then the slower reference backend is used"
    )


def available() -> bool:
    """Whether the compiled kernels can be used."""
    return _native is not None


def unavailable_reason(index: int | None = None) -> str | None:
    """Why `available()` is False and what to do about it, else None; `index`, of a device, is all one."""
    return _reason


def _module() -> ModuleType:
    if _native is None:
        raise RuntimeError(f"kbit CPU kernels: {_reason}")
    return _native


@functools.cache
def _isa_names() -> tuple[str, ...]:
    return tuple(_module().supported_isas())


def supported_isas() -> list[str]:
    """Names that `isa=` and KBIT_CPU_ISA take on this machine, fastest first.

    "avx512" (F, BW, VL, DQ, VBMI, GFNI; with bfloat16 dot products where the CPU has them; then
    "avx512_nobf16" is the same without), "avx2" (and FMA; with GFNI where the CPU has it; then
    "avx2_nogfni" is the same without), "neon" on 64-bit ARM, "portable".
    """
    return list(_isa_names())


@functools.cache
def _isa_index(name: str | None) -> int:
    """Position of an instruction set in the extension's table.

    "avx512" exists there under its own name only with bfloat16 dot products, "avx2" only with GFNI.
    """
    names = supported_isas()
    if name is None:
        name = os.environ.get("KBIT_CPU_ISA") or names[0]
    plain = {"avx512": "avx512_nobf16", "avx2": "avx2_nogfni"}.get(name, name)
    if name not in names and plain in names:
        name = plain
    if name not in names:
        raise ValueError(
            f"kbit: instruction set {name!r} cannot be used on this machine; supported: {', '.join(names)}. "
            "Set KBIT_CPU_ISA (or isa=) to one of these, or unset it."
        )
    return names.index(name)


def isa() -> str:
    """The instruction set in use, without its variant: "avx512", "avx2", "neon" or "portable".

    Raises:
        ValueError: KBIT_CPU_ISA names one that this machine does not support.
    """
    return variant().removesuffix("_nobf16").removesuffix("_nogfni")


def variant() -> str:
    """The instruction set in use, as `supported_isas` names it.

    Raises:
        ValueError: see `isa`.
    """
    return _isa_names()[_isa_index(None)]


def _weight(
    packed: torch.Tensor, absmax: torch.Tensor, codebook: torch.Tensor, scale: torch.Tensor, in_features: int
) -> object:
    """Addresses and sizes of a quantized tensor [N, K] or [E, N, K], as the extension wants them."""
    shape = packed.shape
    return _module().weight(
        packed.data_ptr(),
        packed.numel(),
        absmax.data_ptr(),
        absmax.numel(),
        ABSMAX_DTYPES[absmax.dtype],
        codebook.data_ptr(),
        bits_of(codebook),
        scale.data_ptr(),
        shape[0] if len(shape) == 3 else 1,
        shape[-2],
        in_features,
    )


def quantize(
    w: torch.Tensor,
    codebook: torch.Tensor,
    midpoints: torch.Tensor,
    bits: int,
    search_window: tuple[int, int] | None,
    isa: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize to E4M4 scales, bit for bit as the reference does.

    Args:
        w: [N, K] or [E, N, K], float32, float16 or bfloat16.
        codebook: float32 [2^bits].
        midpoints: float32 [2^bits - 1], ascending.
        bits: 2 to 5.
        search_window: first and last offset of the scale search in E4M4 codes; None takes the rounded absmax.
        isa: instruction set to use instead of the best.

    Returns:
        packed int32 [..., N, blocks * bits], absmax uint8 [..., N, blocks], scale float32 [...].

    Raises:
        NonFiniteWeightError: w holds NaN or Inf.
    """
    *leading, n, k = w.shape
    blocks = blocks_of(k)
    packed = w.new_empty((*leading, n, blocks * bits), dtype=torch.int32)
    absmax = w.new_empty((*leading, n, blocks), dtype=torch.uint8)
    scale = w.new_ones(leading, dtype=torch.float32)
    if w.numel() == 0:
        return packed, absmax, scale
    low, high = search_window or (0, 0)
    nonfinite = _module().quantize(
        _isa_index(isa),
        torch.get_num_threads(),
        w.data_ptr(),
        DTYPES[w.dtype],
        leading[0] if leading else 1,
        n,
        k,
        bits,
        codebook.data_ptr(),
        midpoints.data_ptr(),
        search_window is not None,
        low,
        high,
        packed.data_ptr(),
        absmax.data_ptr(),
        scale.data_ptr(),
    )
    if nonfinite:
        raise NonFiniteWeightError(nonfinite)
    return packed, absmax, scale


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
    isa: str | None = None,
) -> None:
    """Decode into out [..., N, K], rounded to its dtype."""
    weight = _weight(packed, absmax, codebook, scale, in_features)
    dtype, rows = DTYPES[out.dtype], out.numel() // in_features
    _module().dequantize(
        _isa_index(isa), torch.get_num_threads(), weight, 0, rows, dtype, dtype, out.data_ptr()
    )


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
    out: torch.Tensor,
    isa: str | None = None,
) -> None:
    """out [M, N] = x [M, K] @ W.T (+ bias [N]); x, bias and out of one dtype."""
    tokens, threads = x.shape[0], torch.get_num_threads()
    index = _isa_index(isa)
    weight = _weight(packed, absmax, codebook, scale, in_features)
    if panels_win(tokens, x.dtype, _isa_names()[index]):
        native, rows, dtype = _module(), packed.shape[0], DTYPES[x.dtype]

        def decode(begin: int, end: int, panel: torch.Tensor) -> None:
            native.dequantize(index, threads, weight, begin, end, dtype, dtype, panel.data_ptr())

        linear_by_panels(x, bias, out, rows, decode)
        return
    bias_address = 0 if bias is None else bias.data_ptr()
    _module().linear(
        index, threads, weight, x.data_ptr(), tokens, DTYPES[x.dtype], bias_address, out.data_ptr()
    )


def grouped_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    offsets: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
    isa: str | None = None,
) -> None:
    """Rows offsets[e] to offsets[e + 1] of x [T, K] times expert e of [E, N, K]; other rows of out become 0.

    Raises:
        ValueError: offsets int32 [E + 1] do not ascend within 0..T.
    """
    _module().grouped_linear(
        _isa_index(isa),
        torch.get_num_threads(),
        _weight(packed, absmax, codebook, scale, in_features),
        x.data_ptr(),
        x.shape[0],
        DTYPES[x.dtype],
        offsets.data_ptr(),
        out.data_ptr(),
    )


def embedding(
    ids: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    out: torch.Tensor,
    isa: str | None = None,
) -> None:
    """Decode rows ids int64 [T] of [N, K] into out [T, K].

    Raises:
        IndexError: an id is outside 0..N-1.
    """
    _module().embedding(
        _isa_index(isa),
        torch.get_num_threads(),
        _weight(packed, absmax, codebook, scale, in_features),
        ids.data_ptr(),
        ids.numel(),
        DTYPES[out.dtype],
        out.data_ptr(),
    )
