"""Small tensors that kernels of NVFP4 read: the values of codes, factors."""

from __future__ import annotations

import torch

from kbit.backends.cuda.weights import fenced
from kbit.format.codebook import E2M1_MAGNITUDES

# Values of e2m1 codes.
CODEBOOK = (*E2M1_MAGNITUDES, *(-value for value in E2M1_MAGNITUDES))
_MOST_KEPT = 4096
_kept: dict[tuple[tuple[float, ...], int], torch.Tensor] = {}


def constant(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """float32 values on a device, made once: a launch each would be a third of a small product's time.

    Those made while a CUDA graph records belong to that graph and are not kept; nor are more than 4096.
    """
    key = (values, device.index)
    known = _kept.get(key)
    if known is not None:
        return known
    with torch.cuda.device(device):  # whose current stream may be recorded
        # Filled, not copied from the host, so that a CUDA graph can record it.
        parts = [torch.full((1,), value, dtype=torch.float32, device=device) for value in values]
        known = fenced(torch.cat(parts) if len(parts) > 1 else parts[0])
        if len(_kept) < _MOST_KEPT and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(device).synchronize()  # any stream may read it next
            _kept[key] = known
    return known
