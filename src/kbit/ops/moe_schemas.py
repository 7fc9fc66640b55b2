"""The ops around a mixture of experts: which a token takes, rows sorted by expert, and results summed again.

    logits = torch.ops.kbit.moe_logits(x, router_weight)
    ids, weights = torch.ops.kbit.moe_route(logits, top_k, "softmax", True)
    source, bounds, inverse = torch.ops.kbit.moe_align(ids, num_experts)
    rows = x[source]                                  # [T * U, K], rows bounds[e] to bounds[e + 1] are e's
    ...                                               # grouped products with bounds as offsets
    y = torch.ops.kbit.moe_combine(rows, inverse, weights, bounds)

* moe_logits(x [T, K], weight [E, K], dtype?, last?): x @ weight^T [T, E] in `dtype`, which is theirs or
  float32. The weight may be float32 where x has 16 bits; then `dtype` is, too. `last` [1, K] is one more row
  of the weight: the gate of a shared expert.
* moe_route(logits [T, E], top_k, scoring, normalize, bias?, factor, shared): ids int64 [T, top_k] of the
  experts with the largest scores, softmax or sigmoid of the logits in float32, by falling score and of equal
  ones the smallest id first, NaN being the largest; weights of the logits' dtype, those scores, divided by
  their sum if `normalize`, times factor, rounded once. A bias float32 [E] is added to scores for the choice
  alone.
  With `shared`, every token has one more choice, the last, of id E: "one", of weight 1, or "sigmoid", and
  then logits are [T, E + 1] and its weight is the sigmoid of the last.
* moe_align(ids int [T, U], num_experts): source int32 [T * U], the token of each sorted slot; bounds int32
  [num_experts + 1]; inverse int32 [T, U], the slot of each choice. The order is stable: within an expert,
  choices stay in the order of ids. Ids outside 0..num_experts - 1, experts of other devices, come last, in
  slots from bounds[num_experts] on.
* moe_combine(y [R, H], inverse, weights [T, U], bounds?): [T, H] of y's dtype, the sum over u of
  weights[t, u] * y[inverse[t, u]] in float32, products and sums rounded apart, in the order of u, and rounded
  once at the end. Slots outside 0..R - 1, and with bounds those from bounds[-1] on, count as zero and are not
  read.
"""

from __future__ import annotations

import torch

from kbit.ops import moe_checks
from kbit.ops.schemas import LIBRARY, TAGS, define, out_variant

LIBRARY.define(
    "moe_logits(Tensor x, Tensor weight, ScalarType? dtype=None, Tensor? last=None) -> Tensor", tags=TAGS
)
LIBRARY.define(
    "moe_route(Tensor logits, SymInt top_k, str scoring, bool normalize, Tensor? bias=None, "
    "float factor=1.0, str shared='') -> (Tensor ids, Tensor weights)",
    tags=TAGS,
)
LIBRARY.define(
    "moe_align(Tensor ids, SymInt num_experts) -> (Tensor source, Tensor bounds, Tensor inverse)", tags=TAGS
)
define({"moe_combine": ("(Tensor y, Tensor inverse, Tensor weights, Tensor? bounds=None)", True)})


def empty_routing(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `kbit::moe_align` returns, unfilled."""
    source = ids.new_empty((ids.shape[0] * ids.shape[1],), dtype=torch.int32)
    bounds = ids.new_empty((num_experts + 1,), dtype=torch.int32)
    return source, bounds, ids.new_empty(ids.shape, dtype=torch.int32)


@torch.library.register_fake("kbit::moe_logits", lib=LIBRARY)
def moe_logits(x, weight, dtype=None, last=None):  # noqa: D103
    moe_checks.moe_logits(x, weight, dtype, last)
    return x.new_empty((x.shape[0], weight.shape[0] + (last is not None)), dtype=dtype or x.dtype)


@torch.library.register_fake("kbit::moe_route", lib=LIBRARY)
def moe_route(logits, top_k, scoring, normalize, bias=None, factor=1.0, shared=""):  # noqa: D103
    moe_checks.moe_route(logits, top_k, scoring, bias, shared)
    shape = (logits.shape[0], top_k + bool(shared))
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape)


@torch.library.register_fake("kbit::moe_align", lib=LIBRARY)
def moe_align(ids, num_experts):  # noqa: D103
    moe_checks.moe_align(ids, num_experts)
    return empty_routing(ids, num_experts)


@torch.library.register_fake("kbit::moe_combine", lib=LIBRARY)
def moe_combine(y, inverse, weights, bounds=None):  # noqa: D103
    return y.new_empty(moe_checks.moe_combine(y, inverse, weights, bounds))


torch.library.register_fake("kbit::moe_combine.out", out_variant(moe_combine), lib=LIBRARY)
