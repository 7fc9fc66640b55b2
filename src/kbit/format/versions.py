"""How often a tensor was written to, by which what was made of it is known to be of old values."""

from __future__ import annotations

import torch


def version_of(tensor: torch.Tensor) -> int:
    """Torch's count of in-place changes; 0 in torch.compile, and of tensors made in inference mode."""
    return 0 if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version
