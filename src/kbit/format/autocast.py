"""Arithmetic that has its dtypes written out, whatever autocast is on around it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is off on a device; on the meta device there is none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
