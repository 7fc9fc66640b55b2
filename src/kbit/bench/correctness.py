"""Results are compared before they are timed: a benchmark of a wrong kernel is worth nothing."""

from __future__ import annotations

import torch

# Rounding to 16 bits is 0.002 of an output at most.
MAX_RELATIVE_ERROR = 0.01


def require_close(what: str, found: torch.Tensor, expected: torch.Tensor, problem: str = "") -> None:
    """Check a result against float32 arithmetic, or against another kernel.

    Args:
        what: whose result, after the command's name: "bench moe: kbit, k=4".
        found: any dtype.
        expected: float32, of the same shape.
        problem: what was computed, for the message; empty if `what` says so.

    Raises:
        ValueError: they differ by more than rounding to 16 bits explains.
    """
    error = float((found.float() - expected).norm() / expected.norm())
    if not error < MAX_RELATIVE_ERROR:
        raise ValueError(
            f"{what} is wrong{problem and f' on {problem}'}: relative error {error:.3g}, at most "
            f"{MAX_RELATIVE_ERROR} expected. Not measured."
        )
