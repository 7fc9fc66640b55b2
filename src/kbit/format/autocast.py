"""torch.autocast: taking part in it, and arithmetic that has its dtypes written out whatever is on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast is off on a device; on the meta device there is none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def autocast(x: torch.Tensor) -> torch.Tensor:
    """`x` as a linear layer under torch.autocast would take it; kbit's ops compute in the dtype they get."""
    kind = x.device.type
    # Asked of the meta device, torch raises instead of saying no.
    if kind != "meta" and x.is_floating_point() and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x
