"""Which form a weight should have: canonical, or the tiles that a GPU's kernels multiply.

`kbit.dispatch` knows the backends and stands above; it sets the rule, as it registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Holder(Protocol):
    """A `QuantizedTensor` or a layer.

    Attributes:
        stays_canonical: whether its canonical form may not go away, because others use the same memory.
    """

    stays_canonical: bool


# rule(op, device): whether a backend multiplies tiles there. `op` is "linear" or "grouped_linear".
Rule = Callable[[str, torch.device], bool]


def _never(op: str, device: torch.device) -> bool:
    return False


_rule: Rule = _never


def set_rule(rule: Rule) -> Rule:
    """Set the rule.

    Returns:
        The rule before.
    """
    global _rule
    before, _rule = _rule, rule
    return before


def tiles_pay(op: str, device: torch.device, absmax_dtype: torch.dtype) -> bool:
    """Whether `op` on a weight with such block scales is fastest on tiles."""
    return absmax_dtype == torch.uint8 and _rule(op, device)


def should_tile(holder: Holder, op: str, device: torch.device, absmax_dtype: torch.dtype) -> bool:
    """Whether `holder` is to change its weight to tiles now: they pay, and it may."""
    return tiles_pay(op, device, absmax_dtype) and may_change(holder, device)


def may_change(holder: Holder, device: torch.device) -> bool:
    """Whether a weight may leave its canonical form now: not while torch.compile traces.

    A CUDA graph that records the canonical form will read it at every replay, so the holder keeps it then.
    """
    if torch.compiler.is_compiling() or holder.stays_canonical:
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        holder.__dict__["stays_canonical"] = True
        return False
    return True
