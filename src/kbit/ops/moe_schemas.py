"""The ops around a mixture of experts: rows sorted by expert, and results summed per token again.

    source, bounds, inverse = torch.ops.kbit.moe_align(ids, num_experts)
    rows = x[source]                                  # [T * U, K], rows bounds[e] to bounds[e + 1] are e's
    ...                                               # grouped products with bounds as offsets
    y = torch.ops.kbit.moe_combine(rows, inverse, weights, bounds)

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
from kbit.ops.schemas import LIBRARY, TAGS

LIBRARY.define(
    "moe_align(Tensor ids, SymInt num_experts) -> (Tensor source, Tensor bounds, Tensor inverse)", tags=TAGS
)
LIBRARY.define(
    "moe_combine(Tensor y, Tensor inverse, Tensor weights, Tensor? bounds=None) -> Tensor", tags=TAGS
)


def empty_routing(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `kbit::moe_align` returns, unfilled."""
    source = ids.new_empty((ids.shape[0] * ids.shape[1],), dtype=torch.int32)
    bounds = ids.new_empty((num_experts + 1,), dtype=torch.int32)
    return source, bounds, ids.new_empty(ids.shape, dtype=torch.int32)


@torch.library.register_fake("kbit::moe_align", lib=LIBRARY)
def moe_align(ids, num_experts):  # noqa: D103
    moe_checks.moe_align(ids, num_experts)
    return empty_routing(ids, num_experts)


@torch.library.register_fake("kbit::moe_combine", lib=LIBRARY)
def moe_combine(y, inverse, weights, bounds=None):  # noqa: D103
    moe_checks.moe_combine(y, inverse, weights, bounds)
    return y.new_empty((inverse.shape[0], y.shape[1]))
