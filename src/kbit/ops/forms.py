"""Which form a weight should have: canonical, or the tiles that a GPU's kernels multiply.

`kbit.dispatch` knows the backends and stands above; it sets the rule, as it registers the ops.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# rule(op, device): whether a backend multiplies tiles there. `op` is "linear" or "grouped_linear".
Rule = Callable[[str, torch.device], bool]


def _never(op: str, device: torch.device) -> bool:
    return False


_rule: Rule = _never


def set_rule(rule: Rule) -> Rule:
    """Set who decides.

    Returns:
        Who did before.
    """
    global _rule
    before, _rule = _rule, rule
    return before


def tiles_pay(op: str, device: torch.device, absmax_dtype: torch.dtype) -> bool:
    """Whether `op` on a weight with such block scales is fastest on tiles."""
    return absmax_dtype == torch.uint8 and _rule(op, device)


def should_tile(op: str, device: torch.device, absmax_dtype: torch.dtype) -> bool:
    """Whether to change a weight to tiles now: they pay, and no compiler or CUDA graph is recording."""
    if torch.compiler.is_compiling() or not tiles_pay(op, device, absmax_dtype):
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
