"""Implementations of the ops on tiled weights, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kbit.backends import reference
from kbit.backends.cuda import gradients as cuda_gradients
from kbit.backends.cuda import operands
from kbit.backends.cuda import products as cuda_products
from kbit.backends.cuda.weights import ready
from kbit.dispatch import moe
from kbit.dispatch.backends import backend_for, cuda_answers
from kbit.dispatch.ops import check_offsets, contiguous, implement
from kbit.format.adjacent import as_one
from kbit.format.codebook import bits_of
from kbit.format.layout import TILE_ROWS, tile_shape
from kbit.ops import checks, direct, grad_checks, tiled_checks, tiled_schemas


def _weight(tiled, codebook, scale):
    """A weight as products want it, see `kbit.backends.cuda.weights`; without a copy where it is so."""
    return ready(tiled), ready(codebook, multiple=1), ready(scale, multiple=1)


@implement("tile")
def _tile(packed, absmax, in_features, bits):
    tiled_checks.tile(packed, absmax, in_features, bits)
    if not packed.numel():
        return tiled_schemas.tile(packed, absmax, in_features, bits)
    run = backend_for("to_tiled", packed.device, absmax.dtype).module.to_tiled
    return run(*contiguous(packed, absmax), bits, in_features)


@implement("untile")
def _untile(tiled, bits, out_features, in_features):
    tiled_checks.untile(tiled, bits, out_features, in_features)
    if not tiled.numel():
        return tiled_schemas.untile(tiled, bits, out_features, in_features)
    run = backend_for("from_tiled", tiled.device, torch.uint8).module.from_tiled
    return run(tiled.contiguous(), bits, out_features, in_features)


@implement("dequantize_tiled")
def _dequantize(tiled, codebook, scale, out_features, in_features, dtype):
    shape = tiled_checks.dequantize_tiled(tiled, codebook, scale, out_features, in_features, dtype)
    out = tiled.new_empty(shape, dtype=dtype)
    return _run_dequantize(tiled, codebook, scale, out)


@implement("dequantize_tiled.out")
def _dequantize_out(tiled, codebook, scale, out_features, in_features, dtype, *, out):
    shape = tiled_checks.dequantize_tiled(tiled, codebook, scale, out_features, in_features, dtype)
    checks.output("dequantize", out, shape, dtype, tiled.device)
    _run_dequantize(tiled, codebook, scale, out)


def _run_dequantize(tiled, codebook, scale, out):
    if out.numel():
        run = backend_for("dequantize_tiled", tiled.device, torch.uint8).module.dequantize_tiled
        run(*contiguous(tiled, codebook, scale), bits_of(codebook), 0, out)
    return out


@implement("linear_tiled")
def _linear(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul=False):
    arguments = (x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    out = x.new_empty(tiled_checks.linear_tiled(*arguments))
    return _run_linear(*arguments, out)


@implement("linear_tiled.out")
def _linear_out(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul=False, *, out):
    arguments = (x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    shape = tiled_checks.linear_tiled(*arguments)
    checks.output("linear", out, shape, x.dtype, x.device)
    _run_linear(*arguments, out)


def _run_linear(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul, out):
    arguments = (x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul, out)
    if cuda_answers(x) and cuda_products.linear_in_one_launch(*arguments):
        return out
    if out.numel():
        run = backend_for("linear_tiled", x.device, torch.uint8).module.linear_tiled
        rows = x.reshape(-1, in_features).contiguous()
        bias = None if bias is None else bias.contiguous()
        weight = _weight(tiled, codebook, scale)
        y = out.view(rows.shape[0], -1)
        run(rows, *weight, bias, out_features, in_features, silu_and_mul, y)
    return out


def _linear_directly(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul=False):
    out = x.new_empty((*x.shape[:-1], out_features // 2 if silu_and_mul else out_features))
    return _run_linear(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul, out)


def _holds(parts, out_features, in_features):
    tiled, codebook, _ = parts
    return tiled.shape == _tile_shape(out_features, in_features, codebook.shape)


@functools.lru_cache(maxsize=4096)
def _tile_shape(out_features, in_features, codebook_shape):
    return tile_shape(out_features, in_features, codebook_shape.numel().bit_length() - 1)


direct.ways["cuda"] = direct.Way(_linear_directly, _holds, 3, operands.DTYPES)


@implement("merged_linear_tiled")
def _merged_linear(x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul=False):
    arguments = (x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    out = x.new_empty(tiled_checks.merged_linear_tiled(*arguments))
    whole, added = as_one(tiled), as_one(bias) if bias else None
    apart = whole is None or (bias and added is None)
    if not apart and not any(rows % TILE_ROWS for rows in out_features[:-1]):
        rows = sum(out_features)
        return _run_linear(x, whole, codebook, scale, added, rows, in_features, silu_and_mul, out)
    parts = [
        _linear(x, one, codebook, scale, added, rows, in_features)
        for one, added, rows in zip(tiled, bias or [None] * len(tiled), out_features, strict=True)
    ]
    return F.silu(parts[0]) * parts[1] if silu_and_mul else torch.cat(parts, dim=-1)


@implement("experts_tiled")
def _experts(x, gate_up, down, codebook, gate_up_scale, down_scale, ids, weights, intermediate):
    arguments = (x, gate_up, down, codebook, gate_up_scale, down_scale, ids, weights)
    tiled_checks.experts_tiled(*arguments, intermediate)
    if not gate_up.numel() or not ids.numel():
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    run = backend_for("experts_tiled", x.device, torch.uint8).module.experts_tiled
    gate_up, codebook, gate_up_scale = _weight(gate_up, codebook, gate_up_scale)
    down, _, down_scale = _weight(down, codebook, down_scale)
    x, ids, weights = contiguous(x, ids, weights)
    run(x, gate_up, down, codebook, gate_up_scale, down_scale, ids, weights, intermediate, out)
    return out


@implement("experts_with_shared")
def _experts_with_shared(x, gate_up, down, codebook, scale, ids, weights, intermediate):
    tiled_checks.experts_with_shared(x, gate_up, down, codebook, scale, ids, weights, intermediate)
    gates_ups, downs = as_one(gate_up), as_one(down)
    if gates_ups is None or downs is None or intermediate % TILE_ROWS:
        return _experts_beside_shared(x, gate_up, down, codebook, scale, ids, weights, intermediate)
    count = gate_up[0].shape[0] + 1
    stacks = [one.view(count, -1, *one.shape[1:]) for one in (gates_ups, downs)]
    return _experts(x, *stacks, codebook, scale, scale, ids, weights, intermediate)


def _experts_beside_shared(x, gate_up, down, codebook, scale, ids, weights, intermediate):
    """`experts_with_shared` where the tiles are no neighbours: the shared one apart."""
    count, hidden = gate_up[0].shape[0], x.shape[1]
    source, bounds, inverse = moe.align(ids, count)
    constants, one = (codebook, scale[:count], bounds), scale[count]
    rows = _grouped(x, gate_up[0], *constants, 2 * intermediate, hidden, True, source)
    results = _grouped(rows, down[0], *constants, hidden, intermediate)
    sizes = [intermediate, intermediate]
    rows = _merged_linear(x, gate_up[1:], codebook, one, [], sizes, hidden, True)
    shared = _linear(rows, down[1], codebook, one, None, hidden, intermediate)
    return moe.combine(results, inverse, weights, bounds) + weights[:, -1:].to(x.dtype) * shared


@implement("grouped_linear_tiled")
def _grouped(
    x, tiled, codebook, scale, expert_offsets, out_features, in_features, silu_and_mul=False, source=None
):
    arguments = (x, tiled, codebook, scale, expert_offsets, out_features, in_features, silu_and_mul, source)
    out = x.new_empty(tiled_checks.grouped_linear_tiled(*arguments))
    return _run_grouped(*arguments, out)


@implement("grouped_linear_tiled.out")
def _grouped_out(
    x,
    tiled,
    codebook,
    scale,
    expert_offsets,
    out_features,
    in_features,
    silu_and_mul=False,
    source=None,
    *,
    out,
):
    arguments = (x, tiled, codebook, scale, expert_offsets, out_features, in_features, silu_and_mul, source)
    shape = tiled_checks.grouped_linear_tiled(*arguments)
    checks.output("grouped_linear", out, shape, x.dtype, x.device)
    _run_grouped(*arguments, out)


def _check_source(source, rows):
    """Raise ValueError unless `source` names rows of x; like offsets, looked at on the CPU only."""
    if source is not None and source.device.type == "cpu" and source.numel():
        low, high = int(source.min()), int(source.max())
        if low < 0 or high >= rows:
            raise ValueError(
                f"grouped_linear: source must name rows of x, 0..{rows - 1}, got {low}..{high}. Pass "
                f"moe_align's of these tokens."
            )


def _run_grouped(
    x, tiled, codebook, scale, expert_offsets, out_features, in_features, silu_and_mul, source, out
):
    check_offsets(expert_offsets, out.shape[0])
    if not tiled.numel():  # no experts, so no row has one
        return out.zero_()
    if out.numel():
        if not x.shape[0]:  # kernels take a row of x for any number, the nearest one that there is
            raise ValueError(
                f"grouped_linear: source names {out.shape[0]} rows of x, which has none. Pass the tokens "
                f"that were sorted."
            )
        _check_source(source, x.shape[0])
        run = backend_for("grouped_linear_tiled", x.device, torch.uint8).module.grouped_linear_tiled
        weight = _weight(tiled, codebook, scale)
        offsets = expert_offsets.contiguous()
        source = None if source is None else source.contiguous()
        run(x.contiguous(), *weight, offsets, out_features, in_features, silu_and_mul, source, out)
    return out


def _decoder(tiled, codebook, scale, device):
    """decode(first, panel) of one matrix, for `reference.grad_input`."""
    run = backend_for("dequantize_tiled", device, torch.uint8).module.dequantize_tiled
    return lambda first, panel: run(tiled, codebook, scale, bits_of(codebook), first, panel)


@implement("linear_tiled_grad_input")
def _linear_grad_input(grad, tiled, codebook, scale, out_features, in_features):
    grad_checks.tiled(grad, tiled, codebook, scale, out_features, in_features)
    if not grad.numel():  # no tokens, or no out-features to sum over
        return grad.new_zeros((*grad.shape[:-1], in_features))
    tiled, codebook, scale = contiguous(tiled, codebook, scale)
    decode = _decoder(tiled, codebook, scale, grad.device)
    result = reference.grad_input(grad.reshape(-1, out_features), in_features, decode)
    return result.view(*grad.shape[:-1], in_features)


@implement("grouped_linear_tiled_grad_input")
def _grouped_linear_grad_input(grad, tiled, codebook, scale, expert_offsets, out_features, in_features):
    grad_checks.tiled(grad, tiled, codebook, scale, out_features, in_features, expert_offsets)
    check_offsets(expert_offsets, grad.shape[0])
    if not grad.numel() or not tiled.numel():
        return grad.new_zeros((grad.shape[0], in_features))
    tiled, codebook, scale = contiguous(tiled, codebook, scale)
    backend = backend_for("dequantize_tiled", grad.device, torch.uint8)
    if backend.name == "cuda" and cuda_gradients.refusal(grad, out_features, in_features) is None:
        weight = (tiled, codebook, scale, expert_offsets.contiguous())
        run = cuda_gradients.grouped_linear_tiled_grad_input
        return run(grad.contiguous(), *weight, out_features, in_features)

    def decoder(expert):
        return _decoder(tiled[expert], codebook, scale[expert], grad.device)

    return reference.grouped_grad_input(grad, expert_offsets, in_features, decoder)


implement("linear_tiled_train")(_linear)
implement("grouped_linear_tiled_train")(_grouped)
