"""Implementations of `kbit::rotary` and `kbit::rotary_angles`, in the steps of `kbit.dispatch.ops`."""

from __future__ import annotations

from kbit.dispatch.backends import module_on_gpus
from kbit.dispatch.ops import contiguous, implement
from kbit.ops import rotary_schemas


@implement("rotary")
def _rotary(query, key, cos, sin, interleaved=False):
    outputs = rotary_schemas.rotary(query, key, cos, sin, interleaved)
    if query.numel() or key.numel():
        module = module_on_gpus("rotary", query.device)
        module.rotary(query, key, cos, sin, *(out.transpose(1, 2) for out in outputs), interleaved)
    return outputs


@implement("rotary_angles")
def _rotary_angles(frequencies, positions, factor, dtype):
    outputs = rotary_schemas.rotary_angles(frequencies, positions, factor, dtype)
    if outputs[0].numel():
        given = contiguous(frequencies, positions)
        module_on_gpus("rotary_angles", frequencies.device).rotary_angles(*given, factor, *outputs)
    return outputs
