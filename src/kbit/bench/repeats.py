"""Repeated measurements: how many there must be, and the figures that stand for them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MIN_REPEATS = 7


def check_repeats(repeats: int) -> None:
    """Raises ValueError where `repeats` are too few for a median."""
    if repeats < MIN_REPEATS:
        raise ValueError(f"repeats must be at least {MIN_REPEATS} for a median, got {repeats}.")


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """Median of samples, and (max - min) / median; 0 for samples of 0."""
    median = statistics.median(samples)
    return median, (max(samples) - min(samples)) / median if median else 0.0
