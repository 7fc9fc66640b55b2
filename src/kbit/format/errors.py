"""Exceptions that a caller may want to catch by type. All are ValueErrors too."""

from __future__ import annotations

from typing import Any

from kbit.format.words import counted


class KbitError(ValueError):
    """Base of kbit's own exceptions."""


class NonFiniteWeightError(KbitError):
    """A weight to be quantized holds NaN or Inf.

    Attributes:
        count: how many.
        where: name of the weight; may be empty.
    """

    def __init__(self, count: int, where: str = "") -> None:
        self.count, self.where = count, where
        name = where or "weight"
        super().__init__(
            f"quantize: {name} holds {counted(count, 'NaN or Inf value')}; block scales need finite weights. "
            f"Repair the checkpoint, or leave this module out "
            f"(modules_to_not_convert, --skip)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, where an exception pickles its message: worker processes send it back."""
        return type(self), (self.count, self.where), self.__dict__
