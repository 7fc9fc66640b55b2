"""Argument checks of every op. Eager kernels and fake kernels call the same functions.

They look at dtypes, shapes and devices only, so they can be traced; what needs the data (finite weights,
offsets, ids) is checked by the implementations.
"""

from __future__ import annotations

import torch

from kbit.format import type_checks
from kbit.format.codebook import check_bits
from kbit.format.part_checks import check_parts
from kbit.format.scales import absmax_format
from kbit.format.words import at

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF_DTYPES = (torch.float16, torch.bfloat16)


def float_dtype(op: str, name: str, dtype: torch.dtype, where: str = "") -> None:
    """Raise TypeError unless `dtype`, which argument `name` has, is one that ops compute in."""
    if dtype not in FLOAT_DTYPES:
        remedy = "Pass one of torch's." if name.endswith("dtype") else "Cast it first."
        raise TypeError(
            f"{op}: {name} must be float32, float16 or bfloat16, got {dtype!r}{at(where)}. {remedy}"
        )


def quantize(
    w: torch.Tensor, codebook: torch.Tensor, bits: int, absmax_format_name: str, where: str = ""
) -> None:
    """Check the arguments of `kbit::quantize`.

    Raises:
        TypeError: w is not float32, float16 or bfloat16.
        ValueError: w is not [N, K] or [E, N, K] with K >= 1, or codebook, bits, format are illegal.
    """
    check_bits(bits, where=where)
    absmax_format(str(absmax_format_name), where or "quantize")  # a name, not the dtype
    float_dtype("quantize", "w", w.dtype, where)
    if w.dim() not in (2, 3) or w.shape[-1] < 1:
        remedy = "Reshape it" if w.dim() not in (2, 3) else "Leave it as it is: there is nothing to quantize"
        raise ValueError(
            f"quantize: w must be [N, K] or [E, N, K] with K >= 1, got {tuple(w.shape)}{at(where)}. {remedy}."
        )
    if codebook.dtype != torch.float32 or codebook.dim() != 1 or codebook.shape[0] != 2**bits:
        raise ValueError(
            f"quantize: a {bits}-bit codebook is float32 [{2**bits}], got {codebook.dtype} "
            f"{tuple(codebook.shape)}{at(where)}. kbit.quantize makes one of a name or of numbers."
        )
    if codebook.device != w.device:
        raise ValueError(
            f"quantize: w is on {w.device}, the codebook on {codebook.device}{at(where)}. Move them together."
        )


def dequantize(
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    dtype: torch.dtype,
) -> tuple[int, ...]:
    """Check the arguments of `kbit::dequantize`; the result's shape.

    Raises:
        TypeError, ValueError: see `check_parts`; also a dtype that is not float.
    """
    check_parts(packed, absmax, codebook, scale, in_features)
    float_dtype("dequantize", "dtype", dtype)
    return *packed.shape[:-1], in_features


def activation(op: str, x: torch.Tensor, in_features: int, device: torch.device, where: str = "") -> None:
    """Check the input of a linear op against its weight.

    Raises:
        TypeError: x is not float32, float16 or bfloat16.
        ValueError: x is a scalar, has other features than the weight, or is on another device.
    """
    type_checks.tensor(op, "x", x, where)
    float_dtype(op, "x", x.dtype, where)
    if x.dim() < 1 or x.shape[-1] != in_features:
        features = x.shape[-1] if x.dim() else "no"
        raise ValueError(
            f"{op}: x has {features} features, the weight expects {in_features}{at(where)}. "
            f"Check what feeds this layer."
        )
    if x.device != device:
        raise ValueError(f"{op}: x is on {x.device}, the weight on {device}{at(where)}. Move one of them.")


def linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    in_features: int,
) -> tuple[int, ...]:
    """Check the arguments of `kbit::linear`; the result's shape.

    Raises:
        TypeError, ValueError: see `check_parts` and `activation`; also a stacked weight or a wrong bias.
    """
    check_parts(packed, absmax, codebook, scale, in_features)
    linear_inputs(x, (*packed.shape[:-1], in_features), packed.device, bias)
    return *x.shape[:-1], packed.shape[0]


def linear_inputs(
    x: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    bias: torch.Tensor | None,
    silu_and_mul: bool = False,
    where: str = "",
) -> None:
    """Check what a linear op multiplies with a weight of `shape` on `device`; the weight itself is legal.

    Raises:
        TypeError: x is not float, or the bias is not of x's dtype and device.
        ValueError: see `activation`; also a stacked weight, a wrong bias, or rows that are no gate and up.
    """
    activation("linear", x, shape[-1], device, where)
    if len(shape) != 2:
        raise ValueError(
            f"linear: the weight is a stack of {shape[0]} matrices{at(where)}. Use grouped_linear."
        )
    if silu_and_mul:
        gate_and_up("linear", shape[0], where)
    if bias is None:
        return
    type_checks.tensor("linear", "bias", bias, where)
    if bias.shape != shape[:1]:
        raise ValueError(
            f"linear: bias must have shape ({shape[0]},), got {tuple(bias.shape)}{at(where)}. "
            f"Is it that of another layer?"
        )
    if bias.dtype != x.dtype or bias.device != x.device:
        raise TypeError(
            f"linear: bias is {bias.dtype} on {bias.device}, x is {x.dtype} on {x.device}{at(where)}. "
            f"Make them equal."
        )


def is_silu_and_mul(op: str, activation: str | None, where: str = "") -> bool:
    """Whether `activation` asks for silu(gate) * up.

    Raises:
        ValueError: it asks for something else.
    """
    if activation not in (None, "silu_and_mul"):
        raise ValueError(
            f"{op}: activation must be None or 'silu_and_mul', got {activation!r}{at(where)}. Apply others "
            f"yourself."
        )
    return activation is not None


def gate_and_up(op: str, out_features: int, where: str = "") -> None:
    """Raise ValueError unless rows can be gate above up: their number is even."""
    if out_features % 2:
        raise ValueError(
            f"{op}: silu_and_mul needs gate rows above as many up rows, got {out_features}{at(where)}. "
            f"Merge gate and up first."
        )


def grouped_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    expert_offsets: torch.Tensor,
    in_features: int,
) -> tuple[int, int]:
    """Check the arguments of `kbit::grouped_linear`; the result's shape.

    Raises:
        TypeError: offsets are not int32; x is not float.
        ValueError: shapes or devices do not belong together.
    """
    check_parts(packed, absmax, codebook, scale, in_features)
    grouped_inputs(x, (*packed.shape[:-1], in_features), packed.device, expert_offsets)
    return x.shape[0], packed.shape[1]


def grouped_inputs(
    x: torch.Tensor,
    shape: tuple[int, ...],
    device: torch.device,
    expert_offsets: torch.Tensor,
    silu_and_mul: bool = False,
    where: str = "",
) -> None:
    """Check what a grouped linear op multiplies with experts of `shape` on `device`.

    Raises:
        TypeError: offsets are not int32; x is not float.
        ValueError: shapes or devices do not belong together, or rows are no gate and up.
    """
    activation("grouped_linear", x, shape[-1], device, where)
    if len(shape) != 3 or x.dim() != 2:
        raise ValueError(
            f"grouped_linear: x must be [T, K] and the weight [E, N, K], got x {tuple(x.shape)} and weight "
            f"{tuple(shape)}{at(where)}. Use linear for one matrix."
        )
    if silu_and_mul:
        gate_and_up("grouped_linear", shape[1], where)
    offsets("grouped_linear", expert_offsets, shape[0], x.device, where)


def offsets(
    op: str, expert_offsets: torch.Tensor, experts: int, device: torch.device, where: str = ""
) -> None:
    """Raise TypeError or ValueError unless offsets are int32 [experts + 1] on `device`."""
    type_checks.tensor(op, "expert_offsets", expert_offsets, where)
    if expert_offsets.dtype != torch.int32:
        raise TypeError(
            f"{op}: expert_offsets must be int32, got {expert_offsets.dtype}{at(where)}. Use .int()."
        )
    if expert_offsets.dim() != 1 or expert_offsets.shape[0] != experts + 1:
        raise ValueError(
            f"{op}: {experts} experts need expert_offsets of shape ({experts + 1},), got "
            f"{tuple(expert_offsets.shape)}{at(where)}. Expert e has rows offsets[e] to offsets[e + 1]."
        )
    if expert_offsets.device != device:
        raise ValueError(
            f"{op}: expert_offsets is on {expert_offsets.device}, x on {device}{at(where)}. Move one."
        )


def embedding(
    ids: torch.Tensor,
    packed: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    scale: torch.Tensor,
    in_features: int,
    dtype: torch.dtype,
) -> tuple[int, ...]:
    """Check the arguments of `kbit::embedding`; the result's shape.

    Raises:
        IndexError: there are ids, but no rows.
        TypeError: ids are not integers, or dtype is not float.
        ValueError: see `check_parts`; also a stacked weight or another device.
    """
    check_parts(packed, absmax, codebook, scale, in_features)
    float_dtype("embedding", "dtype", dtype)
    embedding_ids(ids, packed.device)
    if packed.dim() != 2:
        raise ValueError(f"embedding: packed must be [N, words], got {tuple(packed.shape)}. Pass one matrix.")
    if not packed.shape[0] and ids.numel():
        raise IndexError(f"embedding: {ids.numel()} ids are looked up in a table of no rows. Fill it first.")
    return *ids.shape, in_features


def embedding_ids(ids: torch.Tensor, device: torch.device, where: str = "") -> None:
    """Check the ids looked up in a table on `device`.

    Raises:
        TypeError: they are no tensor of integers.
        ValueError: they are on another device.
    """
    type_checks.tensor("embedding", "ids", ids, where)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"embedding: ids must be int32 or int64, got {ids.dtype}{at(where)}. Use .long().")
    if ids.device != device:
        raise ValueError(f"embedding: ids are on {ids.device}, the weight on {device}{at(where)}. Move one.")


def output(
    op: str,
    out: torch.Tensor,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    where: str = "",
) -> None:
    """Check a caller's `out=` against the result to be written.

    Raises:
        TypeError: another dtype.
        ValueError: another shape or device, or not contiguous.
    """
    if out.dtype != dtype:
        raise TypeError(f"{op}: out must be {dtype}, got {out.dtype}{at(where)}. Make it of that dtype.")
    if tuple(out.shape) != tuple(shape) or out.device != device or not out.is_contiguous():
        raise ValueError(
            f"{op}: out must be contiguous with shape {tuple(shape)} on {device}, got "
            f"{tuple(out.shape)} with strides {out.stride()} on {out.device}{at(where)}. Make it with "
            f"torch.empty."
        )
