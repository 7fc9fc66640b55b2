"""Exceptions that a caller may want to catch by type. All are ValueErrors too."""

from __future__ import annotations


class KbitError(ValueError):
    """Base of kbit's own exceptions."""


class NonFiniteWeightError(KbitError):
    """A weight to be quantized holds NaN or Inf.

    Attributes:
        count: how many.
    """

    def __init__(self, count: int, where: str = "") -> None:
        self.count = count
        name = where or "weight"
        super().__init__(
            f"quantize: {name} holds {count} NaN or Inf value{'s' if count != 1 else ''}; block scales need "
            f"finite weights. Repair the checkpoint, or leave this module out "
            f"(modules_to_not_convert, --skip)."
        )
