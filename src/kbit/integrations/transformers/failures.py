"""Errors on one rank of a split model, which all ranks raise: the others would wait for one that left alone.

Ranks mostly read the same tensors, and fail alike. Of experts that are split by id each reads its own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from kbit.integrations.transformers import collectives, sharded
from kbit.integrations.transformers.operations import Quantize, Sources
from kbit.integrations.transformers.plan import Planned
from kbit.nn.fuse import Parts, parts_of


class QuantizeAmongRanks(Quantize):
    """Quantizes; of experts that only this rank reads it keeps an error until all ranks can raise it.

    `quantizer.failure` is the first.
    """

    def _single(self, value: Any, planned: Planned, placeholder: Any) -> Parts:
        return self._kept(super()._single, value, planned, placeholder)

    def _fused(self, value: Sources, planned: Planned, placeholder: Any) -> Parts:
        return self._kept(super()._fused, value, planned, placeholder)

    def _kept(
        self, quantize: Callable[[Any, Planned, Any], Parts], value: Any, planned: Planned, placeholder: Any
    ) -> Parts:
        try:
            return quantize(value, planned, placeholder)
        except Exception as error:  # of whatever kind, or the other ranks would wait for this one
            if not sharded.is_by_id(placeholder):
                raise
            self.quantizer.failure = self.quantizer.failure or error
            zeros = torch.zeros(placeholder.to_local().shape, device=_device_of(value))  # to go on with
            return parts_of(self._quantize(zeros, planned.bits, ""))


def _device_of(value: Any) -> torch.device:
    """Where the loader put what it read of a parameter; of what was quantized already nothing is left."""
    lists = value.values() if isinstance(value, Sources) else [value]
    tensors = (one for each in lists for one in (each if isinstance(each, list) else [each]))
    device: torch.device = next(one.device for one in tensors if one is not None)
    return device


def raise_together(model: Any, step: Callable[[], None]) -> None:
    """Take a step; where it fails on some rank of a split model, all of them raise. Every rank must call it.

    Args:
        model: a model; nothing is asked of other ranks if it is not split.
        step: what may raise.

    Raises:
        Exception: that of the first rank that has one.
    """
    error: Exception | None = None
    try:
        step()
    except Exception as raised:
        error = raised
    # All groups, whatever the first one says: their ranks need not be the same.
    for group, device in collectives.groups_of(model).items():
        error = collectives.first_of(_as_sent(error), group, device)
    if error is not None:
        raise error


def _as_sent(error: Exception | None) -> Exception | None:
    """An error as another process can read it: with its type, or else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a type makes of it
        return RuntimeError(str(error))
    return error
