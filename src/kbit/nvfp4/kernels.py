"""What a device has to compute, and who computes it: the reference on CPU, kernels on CUDA.

`Kernels` is the contract. Both `kbit.nvfp4.reference` and `kbit.backends.cuda.nvfp4` are modules with
functions of these names and signatures, and both give the same bytes under the contracts `exact` and `seq16`.
All tensors of a call are contiguous and on one device. Quantized data is in the `nv` layout: codes uint8
[..., K16 / 2] with element 2j in the low nibble, scales uint8 [..., K16 / 16], K16 = K rounded up to a
multiple of 16; the elements beyond K are code 0.

Arithmetic is IEEE float32 with correctly rounded +, *, /, sqrt and fma, no contraction other than where "fma"
is written and no flush to zero. T is the storage dtype (float16, bfloat16 or float32), round_T rounds to
nearest even.

Products: `kbit.nvfp4.product_kernels`.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch

from kbit.nvfp4.product_kernels import ProductKernels

Tensor = torch.Tensor


class Kernels(ProductKernels, Protocol):
    """Functions of `kbit.nvfp4.reference` and `kbit.backends.cuda.nvfp4`."""

    def quantize(
        self, x: Tensor, search: bool, ties_even: bool, global_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Quantize rows.

        What is quantized is v = float32(x) / float32(global_scale), correctly rounded. Per 16 elements of v,
        those beyond K being +0:
          a block with a NaN or infinite v: scale byte 0, codes 0.
          amax = max|v|; c0 = ue4m3(amax / 6), nearest even, at most 0x7E.
          candidates c0, c0 - 1, c0 + 1, c0 - 2, c0 + 2 within 0..0x7E (only c0 without search).
          s = decode(c); inv = s > 0 ? 1 / s : 0; t = |v| * inv;
          i = count of t > {.25, .75, 1.25, 1.75, 2.5, 3.5, 5}; with ties_even t >= {.75, 1.75, 3.5} for
          these. d = |v| - magnitude[i] * s; err = fma(d, d, err) over the 16 in order, from +0.
          the first candidate stays unless a later one has a strictly smaller err (infinity is not smaller).
          code = i + 8 * (v < 0).

        Args:
            x: float16, bfloat16 or float32 [M, K].
            search: try the neighbouring scales.
            ties_even: ties of magnitudes to the even code, else toward zero.
            global_scale: rounded to float32 before use.

        Returns:
            codes [M, K16 / 2], scales [M, K16 / 16].
        """
        ...

    def quantize_rows(
        self, x: Tensor, search: bool, ties_even: bool, global_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Quantize rows, each by a factor of its own.

        row_scale[m] = (amax / float32(global_scale)) / 2688, amax the row's largest magnitude, or 1 where
        that is zero, subnormal, infinite or NaN. What is quantized as by `quantize` is
        v = (float32(x) / float32(global_scale)) / row_scale[m]. All divisions are correctly rounded.

        Returns:
            codes [M, K16 / 2], scales [M, K16 / 16], row_scale float32 [M].
        """
        ...

    def repack(self, codes: Tensor, scales: Tensor, layout: str) -> Tensor:
        """Interleave codes [..., N, K16 / 2] and scales [..., N, K16 / 16].

        Returns:
            uint8, layout "ggml": [..., N, 36 * ceil(K16 / 64)], "mmq": [..., 2 * ceil(K16 / 512), N, 144].
            Padding is bytes of 0.
        """
        ...

    def dequantize(
        self, codes: Tensor, scales: Tensor, global_scale: float, row_scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """[M, K16 / 2], [M, K16 / 16] -> [M, K16]: round_T((magnitude * s * global_scale) * row_scale[m]).

        magnitude * s is exact; the sign of a negative zero stays.
        """
        ...

    def gather_rows(self, codes: Tensor, scales: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows `rows` (int32 [R]) of codes and scales; both outputs contiguous."""
        ...

    def quantize_scatter(
        self, x: Tensor, slots: Tensor, search: bool, ties_even: bool, global_scale: float
    ) -> tuple[Tensor, Tensor]:
        """Quantize row t of x [T, K] once and store it at rows slots[t, 0..U-1] (int32 [T, U]).

        slots is a permutation of 0..T*U-1, so every row of codes [T*U, ...] and scales is written.
        """
        ...

    def align(self, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sort (token, choice) pairs by expert, stably; see `kbit.nvfp4.moe_align`.

        Args:
            ids: int32 [T, U]; an id outside 0..num_experts - 1 sorts last.
            num_experts: E.

        Returns:
            source int32 [T * U] = slots // U, slots int32 [T * U], bounds int32 [E + 1], inverse int32 [T, U]
            with inverse.flatten()[slots[r]] = r.
        """
        ...

    def combine(self, y: Tensor, inverse: Tensor, p: Tensor) -> Tensor:
        """Sum each token's experts: [R, N] sorted rows, int32 [T, U], float32 [T, U] -> [T, N] of y's dtype.

        acc = +0; for u ascending: acc = acc + (float32(y[inverse[t, u]]) * p[t, u]), product and sum rounded
        apart (no fma); round_T(acc).
        """
        ...

    def rmsnorm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The stand-alone norm: x [M, K] -> (norm [M, K], h [M, K]), both of x's dtype T.

        h = x, or round_T(x + residual). 256 partial sums: number t takes columns 8t .. 8t + 7, then those
        + 2048, + 4096 and so on, ascending, partial = fma(h, h, partial) from +0. In each 32 consecutive
        partials: s = s + s[lane xor 16], then 8, 4, 2, 1. The 8 results w0..w7: ((w0 + w1) + w2) + ... + w7.
        r = 1 / sqrt(sum / K + eps), each operation rounded (eps to float32 first).
        norm = round_T(round_T(h * r) * weight); weight is widened to float32.
        """
        ...

    def rmsnorm_quantize(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None,
        write_norm: bool,
        search: bool,
        ties_even: bool,
        global_scale: float,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """`rmsnorm`, and its norm quantized: (codes, scales, norm or None without write_norm, h)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[R, 2I] -> [R, I]: round_T(round_T(g / (1 + exp(-g))) * u), g a row's first half, u its second.

        exp is the polynomial of `kbit.nvfp4.exact`.
        """
        ...

    def silu_mul_quantize(
        self, gate_up: Tensor, search: bool, ties_even: bool, global_scale: float
    ) -> tuple[Tensor, Tensor]:
        """`silu_mul`, quantized: (codes, scales)."""
        ...


def kernels_for(tensor: Tensor, **others: Tensor | None) -> Kernels:
    """Who computes on a tensor's device.

    Args:
        tensor: an operand.
        **others: operands by name that have to be on the same device; a kernel would read any address.

    Raises:
        ValueError: neither CPU nor CUDA, or CUDA without a usable compiler; operands on several devices.
    """
    for name, other in others.items():
        if other is not None and other.device != tensor.device:
            raise ValueError(
                f"nvfp4: {name} is on {other.device}, the operand beside it on {tensor.device}. Move one of "
                f"them."
            )
    if tensor.device.type == "cpu":
        from kbit.nvfp4 import reference  # not above: it imports torch's compiler, which takes a second

        return cast(Kernels, reference)
    if tensor.device.type != "cuda":
        raise ValueError(f"nvfp4: tensors must be on cpu or cuda, got {tensor.device}. Move them.")
    from kbit.backends import cuda

    reason = cuda.unavailable_reason(tensor.device.index)
    if reason is not None:
        raise ValueError(f"nvfp4: the CUDA kernels cannot run here: {reason}.")
    return cast(Kernels, importlib.import_module("kbit.backends.cuda.nvfp4"))
