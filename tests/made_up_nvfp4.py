"""Random NVFP4 tensors."""

from __future__ import annotations

import torch

from kbit.nvfp4 import NVFP4Tensor
from kbit.nvfp4.formats import e2m1


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_tensor(shape: tuple[int, ...], seed: int) -> NVFP4Tensor:
    """Any codes and scales."""
    groups = -(-shape[-1] // 16)
    codes = torch.randint(16, (*shape[:-1], groups * 16), generator=draw(seed)).to(torch.uint8)
    codes[..., shape[-1] :] = 0
    scales = torch.randint(0x7F, (*shape[:-1], groups), generator=draw(seed + 1)).to(torch.uint8)
    factor = torch.rand(shape[:-2], generator=draw(seed + 2)) + 0.5
    return NVFP4Tensor(e2m1.pack(codes), scales, factor, shape)
