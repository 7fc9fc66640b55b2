"""The ops `torch.ops.kbit.*`: schemas, and fake kernels that describe results without computing them.

Implementations are registered by `kbit.dispatch`. Shapes: W is [N, K] or [E, N, K]; see `QuantizedTensor`
for packed, absmax, codebook and scale. Python-side `Library.define` is used, not `custom_op`, because a
call then costs 3 us instead of 10.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kbit.format import scales
from kbit.format.reference import blocks_of
from kbit.ops import checks, grad_checks

LIBRARY = torch.library.Library("kbit", "DEF")

_WEIGHT = "Tensor packed, Tensor absmax, Tensor codebook, Tensor scale"

# name -> (arguments, has an out= variant)
SCHEMAS: dict[str, tuple[str, bool]] = {
    "dequantize": (f"({_WEIGHT}, SymInt in_features, ScalarType dtype)", True),
    "linear": (f"(Tensor x, {_WEIGHT}, Tensor? bias, SymInt in_features)", True),
    "grouped_linear": (f"(Tensor x, {_WEIGHT}, Tensor expert_offsets, SymInt in_features)", True),
    "embedding": (f"(Tensor ids, {_WEIGHT}, SymInt in_features, ScalarType dtype)", True),
    # grad [..., N] -> [..., K]: the product with W itself instead of its transpose.
    "linear_grad_input": (f"(Tensor grad, {_WEIGHT}, SymInt in_features)", False),
    "grouped_linear_grad_input": (
        f"(Tensor grad, {_WEIGHT}, Tensor expert_offsets, SymInt in_features)",
        False,
    ),
    # The same results as linear and grouped_linear, with an autograd formula: registering one costs every
    # call microseconds, so inference does not pass through these.
    "linear_train": (f"(Tensor x, {_WEIGHT}, Tensor? bias, SymInt in_features)", False),
    "grouped_linear_train": (f"(Tensor x, {_WEIGHT}, Tensor expert_offsets, SymInt in_features)", False),
}

# Of every op: strides as given, and traceable.
TAGS = (torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag)


def define(schemas: Mapping[str, tuple[str, bool]]) -> None:
    """Declare ops that return one tensor: {name: (arguments, whether it has an out= variant)}."""
    for name, (arguments, has_out) in schemas.items():
        LIBRARY.define(f"{name}{arguments} -> Tensor", tags=TAGS)
        if has_out:
            # Returning nothing, not the aliased out: torch.compile functionalizes only such custom ops.
            LIBRARY.define(f"{name}.out{arguments[:-1]}, *, Tensor(a!) out) -> ()", tags=TAGS)


LIBRARY.define(
    "quantize(Tensor w, Tensor codebook, int bits, str absmax_format, bool search)"
    " -> (Tensor packed, Tensor absmax, Tensor scale)",
    tags=TAGS,
)
define(SCHEMAS)


@torch.library.register_fake("kbit::quantize", lib=LIBRARY)
def quantize(w, codebook, bits, absmax_format, search):  # noqa: D103
    checks.quantize(w, codebook, bits, absmax_format)
    blocks = blocks_of(w.shape[-1])
    stored = scales.absmax_format(absmax_format).dtype
    packed = w.new_empty((*w.shape[:-1], blocks * bits), dtype=torch.int32)
    absmax = w.new_empty((*w.shape[:-1], blocks), dtype=stored)
    return packed, absmax, w.new_empty(w.shape[:-2], dtype=torch.float32)


@torch.library.register_fake("kbit::dequantize", lib=LIBRARY)
def dequantize(packed, absmax, codebook, scale, in_features, dtype):  # noqa: D103
    shape = checks.dequantize(packed, absmax, codebook, scale, in_features, dtype)
    return packed.new_empty(shape, dtype=dtype)


@torch.library.register_fake("kbit::linear", lib=LIBRARY)
def linear(x, packed, absmax, codebook, scale, bias, in_features):  # noqa: D103
    return x.new_empty(checks.linear(x, packed, absmax, codebook, scale, bias, in_features))


@torch.library.register_fake("kbit::grouped_linear", lib=LIBRARY)
def grouped_linear(x, packed, absmax, codebook, scale, expert_offsets, in_features):  # noqa: D103
    return x.new_empty(checks.grouped_linear(x, packed, absmax, codebook, scale, expert_offsets, in_features))


@torch.library.register_fake("kbit::embedding", lib=LIBRARY)
def embedding(ids, packed, absmax, codebook, scale, in_features, dtype):  # noqa: D103
    shape = checks.embedding(ids, packed, absmax, codebook, scale, in_features, dtype)
    return packed.new_empty(shape, dtype=dtype)


@torch.library.register_fake("kbit::linear_grad_input", lib=LIBRARY)
def linear_grad_input(grad, packed, absmax, codebook, scale, in_features):  # noqa: D103
    grad_checks.canonical(grad, packed, absmax, codebook, scale, in_features)
    return grad.new_empty((*grad.shape[:-1], in_features))


@torch.library.register_fake("kbit::grouped_linear_grad_input", lib=LIBRARY)
def grouped_linear_grad_input(  # noqa: D103
    grad, packed, absmax, codebook, scale, expert_offsets, in_features
):
    grad_checks.canonical(grad, packed, absmax, codebook, scale, in_features, expert_offsets)
    return grad.new_empty((grad.shape[0], in_features))


def out_variant(functional):
    """The fake kernel of an `out=` variant, from that of the op itself."""

    def fake(*args, out, **kwargs):
        result = functional(*args, **kwargs)
        checks.output(functional.__name__, out, result.shape, result.dtype, result.device)

    return fake


for _functional in (dequantize, linear, grouped_linear, embedding):
    torch.library.register_fake(f"kbit::{_functional.__name__}.out", out_variant(_functional), lib=LIBRARY)
torch.library.register_fake("kbit::linear_train", linear, lib=LIBRARY)
torch.library.register_fake("kbit::grouped_linear_train", grouped_linear, lib=LIBRARY)
