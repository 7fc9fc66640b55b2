"""The mask of causal attention in PyTorch: the definition that the kernel is tested against."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def causal_mask(first: torch.Tensor, there: torch.Tensor | None, out: torch.Tensor) -> None:
    """`kbit::causal_mask` into `out` [B, T, K]."""
    tokens, keys = (torch.arange(count, device=first.device) for count in out.shape[1:])
    seen = (keys <= first.view(1, 1, 1) + tokens[:, None]).expand(out.shape)
    if there is not None:
        known = F.pad(there, (0, max(0, len(keys) - there.shape[1])))[:, : len(keys)]
        seen = seen & known[:, None]
    out.zero_().masked_fill_(~seen, -math.inf)
