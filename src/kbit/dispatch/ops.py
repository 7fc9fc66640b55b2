"""Implementations of `torch.ops.kbit.*`: check, allocate, flatten to what backends take, and hand over.

Backends get contiguous tensors with x as [M, K] and write products and decoded weights into `out`. What
`quantize` and changes of form return, they allocate themselves. Where an op's fake kernel does all that comes
before the launch, it is called here, too: it checks arguments and returns the result, unfilled.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.autograd.graph import increment_version

from kbit.backends import reference
from kbit.dispatch.backends import backend_for
from kbit.format.codebook import midpoints
from kbit.format.scales import absmax_format
from kbit.ops import checks, direct, grad_checks, schemas
from kbit.quantizers.scale_search import WINDOWS


def implement(name: str):
    """Register the decorated function as the kernel of an op on every device."""

    def register(function):
        kernel = _counting(function) if name.endswith(".out") else function
        schemas.LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
        return function

    return register


def _counting(function):
    """An `out=` variant that lets autograd notice the write: no op of a library does of itself."""

    @wraps(function)
    def write(*args, out, **kwargs):
        function(*args, out=out, **kwargs)
        increment_version(out)

    return write


def contiguous(*tensors) -> tuple[Any, ...]:
    """The tensors as backends want them; no copy where they are so already."""
    return tuple(tensor.contiguous() for tensor in tensors)


@implement("quantize")
def _quantize(w, codebook, bits, absmax_format_name, search):
    checks.quantize(w, codebook, bits, absmax_format_name)
    w = w.contiguous()
    backend = backend_for("quantize", w.device, absmax_format(absmax_format_name).dtype)
    if backend.name != "reference":
        window = WINDOWS[bits] if search else None
        return backend.module.quantize(w, codebook.contiguous(), midpoints(codebook), bits, window)
    return backend.module.quantize(w, codebook, absmax_format_name, search)


@implement("dequantize")
def _dequantize(packed, absmax, codebook, scale, in_features, dtype):
    shape = checks.dequantize(packed, absmax, codebook, scale, in_features, dtype)
    out = packed.new_empty(shape, dtype=dtype)
    return _run_dequantize(packed, absmax, codebook, scale, in_features, out)


@implement("dequantize.out")
def _dequantize_out(packed, absmax, codebook, scale, in_features, dtype, *, out):
    shape = checks.dequantize(packed, absmax, codebook, scale, in_features, dtype)
    checks.output("dequantize", out, shape, dtype, packed.device)
    _run_dequantize(packed, absmax, codebook, scale, in_features, out)


def _run_dequantize(packed, absmax, codebook, scale, in_features, out):
    if out.numel():
        run = backend_for("dequantize", packed.device, absmax.dtype).module.dequantize
        run(*contiguous(packed, absmax, codebook, scale), in_features, out)
    return out


@implement("linear")
def _linear(x, packed, absmax, codebook, scale, bias, in_features):
    out = x.new_empty(checks.linear(x, packed, absmax, codebook, scale, bias, in_features))
    return _run_linear(x, packed, absmax, codebook, scale, bias, in_features, out)


@implement("linear.out")
def _linear_out(x, packed, absmax, codebook, scale, bias, in_features, *, out):
    shape = checks.linear(x, packed, absmax, codebook, scale, bias, in_features)
    checks.output("linear", out, shape, x.dtype, x.device)
    _run_linear(x, packed, absmax, codebook, scale, bias, in_features, out)


def _run_linear(x, packed, absmax, codebook, scale, bias, in_features, out):
    if out.numel():
        run = backend_for("linear", x.device, absmax.dtype).module.linear
        rows = x.reshape(-1, in_features).contiguous()
        bias = None if bias is None else bias.contiguous()
        weight = contiguous(packed, absmax, codebook, scale)
        run(rows, *weight, bias, in_features, out.view(rows.shape[0], -1))
    return out


def _linear_directly(x, packed, absmax, codebook, scale, bias, out_features, in_features):
    out = x.new_empty((*x.shape[:-1], out_features))
    return _run_linear(x, packed, absmax, codebook, scale, bias, in_features, out)


def _holds(parts, out_features, in_features):
    """Whether canonical parts have so many rows; the kernels' bindings check their columns."""
    packed, absmax, *_ = parts
    return packed.shape[:-1] == absmax.shape[:-1] == (out_features,)


direct.ways["cpu"] = direct.Way(_linear_directly, _holds, 4, checks.FLOAT_DTYPES)


@implement("grouped_linear")
def _grouped_linear(x, packed, absmax, codebook, scale, expert_offsets, in_features):
    arguments = (x, packed, absmax, codebook, scale, expert_offsets, in_features)
    out = x.new_empty(checks.grouped_linear(*arguments))
    return _run_grouped(*arguments, out)


@implement("grouped_linear.out")
def _grouped_linear_out(x, packed, absmax, codebook, scale, expert_offsets, in_features, *, out):
    arguments = (x, packed, absmax, codebook, scale, expert_offsets, in_features)
    checks.output("grouped_linear", out, checks.grouped_linear(*arguments), x.dtype, x.device)
    _run_grouped(*arguments, out)


def check_offsets(expert_offsets, rows):
    """Check that offsets, int32 [E + 1], ascend within 0..rows.

    They are data: they are looked at on the CPU only, where that costs no synchronisation.

    Raises:
        ValueError: they do not.
    """
    if expert_offsets.is_cuda:
        return
    ascending = bool((expert_offsets[1:] >= expert_offsets[:-1]).all())
    if not ascending or int(expert_offsets[0]) < 0 or int(expert_offsets[-1]) > rows:
        raise ValueError(
            f"grouped_linear: expert_offsets must ascend within 0..{rows}, the rows of x, got "
            f"{expert_offsets.tolist()}. Sort rows by expert and count them."
        )


def _run_grouped(x, packed, absmax, codebook, scale, expert_offsets, in_features, out):
    check_offsets(expert_offsets, x.shape[0])
    if not packed.numel():  # no experts, so no row has one
        return out.zero_()
    if out.numel():
        run = backend_for("grouped_linear", x.device, absmax.dtype).module.grouped_linear
        weight = contiguous(packed, absmax, codebook, scale)
        run(x.contiguous(), *weight, expert_offsets.contiguous(), in_features, out)
    return out


@implement("embedding")
def _embedding(ids, packed, absmax, codebook, scale, in_features, dtype):
    shape = checks.embedding(ids, packed, absmax, codebook, scale, in_features, dtype)
    out = packed.new_empty(shape, dtype=dtype)
    return _run_embedding(ids, packed, absmax, codebook, scale, in_features, out)


@implement("embedding.out")
def _embedding_out(ids, packed, absmax, codebook, scale, in_features, dtype, *, out):
    shape = checks.embedding(ids, packed, absmax, codebook, scale, in_features, dtype)
    checks.output("embedding", out, shape, dtype, packed.device)
    _run_embedding(ids, packed, absmax, codebook, scale, in_features, out)


def _run_embedding(ids, packed, absmax, codebook, scale, in_features, out):
    if out.numel():
        run = backend_for("embedding", ids.device, absmax.dtype).module.embedding
        weight = contiguous(packed, absmax, codebook, scale)
        run(ids.reshape(-1).long().contiguous(), *weight, in_features, out.view(-1, in_features))
    return out


def _decoder(packed, absmax, codebook, scale, in_features, device):
    """decode(first, panel): the rows of one matrix from `first` on, into a panel [rows, in_features]."""
    run = backend_for("dequantize", device, absmax.dtype).module.dequantize

    def decode(first, panel):
        rows = slice(first, first + panel.shape[0])
        run(packed[rows], absmax[rows], codebook, scale, in_features, panel)

    return decode


@implement("linear_grad_input")
def _linear_grad_input(grad, packed, absmax, codebook, scale, in_features):
    grad_checks.canonical(grad, packed, absmax, codebook, scale, in_features)
    if not grad.numel():  # no tokens, or no out-features to sum over
        return grad.new_zeros((*grad.shape[:-1], in_features))
    packed, absmax, codebook, scale = contiguous(packed, absmax, codebook, scale)
    decode = _decoder(packed, absmax, codebook, scale, in_features, grad.device)
    result = reference.grad_input(grad.reshape(-1, packed.shape[0]), in_features, decode)
    return result.view(*grad.shape[:-1], in_features)


@implement("grouped_linear_grad_input")
def _grouped_linear_grad_input(grad, packed, absmax, codebook, scale, expert_offsets, in_features):
    grad_checks.canonical(grad, packed, absmax, codebook, scale, in_features, expert_offsets)
    check_offsets(expert_offsets, grad.shape[0])
    if not grad.numel() or not packed.numel():
        return grad.new_zeros((grad.shape[0], in_features))
    packed, absmax, codebook, scale = contiguous(packed, absmax, codebook, scale)

    def decoder(expert):
        return _decoder(packed[expert], absmax[expert], codebook, scale[expert], in_features, grad.device)

    return reference.grouped_grad_input(grad, expert_offsets, in_features, decoder)


implement("linear_train")(_linear)
implement("grouped_linear_train")(_grouped_linear)
