"""The ops `torch.ops.kbit.*` on tiled weights: schemas and fake kernels.

Tiles are int32 [E?, row tiles, column tiles, words], see `kbit.format.layout`; their width is the codebook's.
With silu_and_mul, W holds 2I rows, gate above up, and the result [..., I] is silu(gate) * up: gate and up are
rounded to x's dtype first, then silu, then the product, as layers that are not fused do. With `source`,
int32 [R], the sorted rows are x[source], and x need not be sorted.

merged_linear_tiled is the products of x by several weights side by side, or with silu_and_mul, of two,
silu(first) * second. All have one codebook and one factor, and each has a bias, or none has: an empty list.
Where tiles and biases are neighbours in memory, as `kbit.format.adjacent` makes them, it is one launch.

experts_tiled(x [T, H], ..., ids [T, U], weights [T, U], I) is a whole layer of experts: for each token the
sum over u of weights[u] * down(silu(gate(x)) * up(x)) of expert ids[u]. Ids outside 0..E - 1 add nothing.
Results of experts need not be rounded before they are added.

experts_with_shared(x [T, H], ..., ids [T, U], weights [T, U], I) is the same of E experts and a shared one,
which is expert E and the last choice of every token: gate_up are the tiles of the experts, of the shared
one's gate and of its up, down those of the experts and of the shared one. All factors are scale float32
[E + 1].
"""

from __future__ import annotations

import torch

from kbit.format.layout import tile_shape
from kbit.format.reference import blocks_of
from kbit.ops import grad_checks, tiled_checks
from kbit.ops.schemas import LIBRARY, TAGS, define, out_variant

_WEIGHT = "Tensor tiled, Tensor codebook, Tensor scale"
_SIZES = "SymInt out_features, SymInt in_features"

# name -> (arguments, has an out= variant). The training ops have no silu_and_mul: gradients need gate and up.
SCHEMAS: dict[str, tuple[str, bool]] = {
    "dequantize_tiled": (f"({_WEIGHT}, {_SIZES}, ScalarType dtype)", True),
    "linear_tiled": (f"(Tensor x, {_WEIGHT}, Tensor? bias, {_SIZES}, bool silu_and_mul=False)", True),
    "linear_tiled_train": (f"(Tensor x, {_WEIGHT}, Tensor? bias, {_SIZES})", False),
    "linear_tiled_grad_input": (f"(Tensor grad, {_WEIGHT}, {_SIZES})", False),
    "merged_linear_tiled": (
        "(Tensor x, Tensor[] tiled, Tensor codebook, Tensor scale, Tensor[] bias, SymInt[] out_features, "
        "SymInt in_features, bool silu_and_mul=False)",
        False,
    ),
    "grouped_linear_tiled": (
        f"(Tensor x, {_WEIGHT}, Tensor expert_offsets, {_SIZES}, bool silu_and_mul=False, "
        "Tensor? source=None)",
        True,
    ),
    "grouped_linear_tiled_train": (f"(Tensor x, {_WEIGHT}, Tensor expert_offsets, {_SIZES})", False),
    "grouped_linear_tiled_grad_input": (f"(Tensor grad, {_WEIGHT}, Tensor expert_offsets, {_SIZES})", False),
    "experts_with_shared": (
        "(Tensor x, Tensor[] gate_up, Tensor[] down, Tensor codebook, Tensor scale, Tensor ids, "
        "Tensor weights, SymInt intermediate)",
        False,
    ),
    "experts_tiled": (
        "(Tensor x, Tensor gate_up, Tensor down, Tensor codebook, Tensor gate_up_scale, Tensor down_scale, "
        "Tensor ids, Tensor weights, SymInt intermediate)",
        False,
    ),
}


LIBRARY.define("tile(Tensor packed, Tensor absmax, SymInt in_features, int bits) -> Tensor", tags=TAGS)
LIBRARY.define(f"untile(Tensor tiled, int bits, {_SIZES}) -> (Tensor packed, Tensor absmax)", tags=TAGS)
define(SCHEMAS)


@torch.library.register_fake("kbit::tile", lib=LIBRARY)
def tile(packed, absmax, in_features, bits):  # noqa: D103
    tiled_checks.tile(packed, absmax, in_features, bits)
    return packed.new_empty((*packed.shape[:-2], *tile_shape(packed.shape[-2], in_features, bits)))


@torch.library.register_fake("kbit::untile", lib=LIBRARY)
def untile(tiled, bits, out_features, in_features):  # noqa: D103
    tiled_checks.untile(tiled, bits, out_features, in_features)
    rows, blocks = (*tiled.shape[:-3], out_features), blocks_of(in_features)
    return tiled.new_empty((*rows, blocks * bits)), tiled.new_empty((*rows, blocks), dtype=torch.uint8)


@torch.library.register_fake("kbit::dequantize_tiled", lib=LIBRARY)
def dequantize_tiled(tiled, codebook, scale, out_features, in_features, dtype):  # noqa: D103
    shape = tiled_checks.dequantize_tiled(tiled, codebook, scale, out_features, in_features, dtype)
    return tiled.new_empty(shape, dtype=dtype)


@torch.library.register_fake("kbit::linear_tiled", lib=LIBRARY)
def linear_tiled(  # noqa: D103
    x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul=False
):
    arguments = (x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    return x.new_empty(tiled_checks.linear_tiled(*arguments))


@torch.library.register_fake("kbit::merged_linear_tiled", lib=LIBRARY)
def merged_linear_tiled(  # noqa: D103
    x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul=False
):
    arguments = (x, tiled, codebook, scale, bias, out_features, in_features, silu_and_mul)
    return x.new_empty(tiled_checks.merged_linear_tiled(*arguments))


@torch.library.register_fake("kbit::grouped_linear_tiled", lib=LIBRARY)
def grouped_linear_tiled(  # noqa: D103
    x, tiled, codebook, scale, expert_offsets, out_features, in_features, silu_and_mul=False, source=None
):
    arguments = (x, tiled, codebook, scale, expert_offsets, out_features, in_features, silu_and_mul, source)
    return x.new_empty(tiled_checks.grouped_linear_tiled(*arguments))


@torch.library.register_fake("kbit::experts_tiled", lib=LIBRARY)
def experts_tiled(  # noqa: D103
    x, gate_up, down, codebook, gate_up_scale, down_scale, ids, weights, intermediate
):
    tiled_checks.experts_tiled(
        x, gate_up, down, codebook, gate_up_scale, down_scale, ids, weights, intermediate
    )
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("kbit::experts_with_shared", lib=LIBRARY)
def experts_with_shared(x, gate_up, down, codebook, scale, ids, weights, intermediate):  # noqa: D103
    tiled_checks.experts_with_shared(x, gate_up, down, codebook, scale, ids, weights, intermediate)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("kbit::linear_tiled_grad_input", lib=LIBRARY)
def linear_tiled_grad_input(grad, tiled, codebook, scale, out_features, in_features):  # noqa: D103
    grad_checks.tiled(grad, tiled, codebook, scale, out_features, in_features)
    return grad.new_empty((*grad.shape[:-1], in_features))


@torch.library.register_fake("kbit::grouped_linear_tiled_grad_input", lib=LIBRARY)
def grouped_linear_tiled_grad_input(  # noqa: D103
    grad, tiled, codebook, scale, expert_offsets, out_features, in_features
):
    grad_checks.tiled(grad, tiled, codebook, scale, out_features, in_features, expert_offsets)
    return grad.new_empty((grad.shape[0], in_features))


for _functional in (dequantize_tiled, linear_tiled, grouped_linear_tiled):
    torch.library.register_fake(f"kbit::{_functional.__name__}.out", out_variant(_functional), lib=LIBRARY)
torch.library.register_fake("kbit::linear_tiled_train", linear_tiled, lib=LIBRARY)
torch.library.register_fake("kbit::grouped_linear_tiled_train", grouped_linear_tiled, lib=LIBRARY)
