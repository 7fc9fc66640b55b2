"""torch.autocast: taking part in it, and arithmetic that has its dtypes written out whatever is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is off on a device; on the meta device there is none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What linear layers on a device compute in under torch.autocast; None where that is off."""
    kind = device.type
    # Asked of the meta device, torch raises instead of saying no.
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` as a linear layer under torch.autocast would take it; kbit's ops compute in the dtype they get."""
    taken = x.is_floating_point() and x.dtype != torch.float64  # as torch's own layers
    dtype = autocast_dtype(x.device) if taken else None
    return x if dtype is None else x.to(dtype)
