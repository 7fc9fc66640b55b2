"""Tensors compared bit for bit."""

from __future__ import annotations

import torch


def assert_same(name: str, have: torch.Tensor, want: torch.Tensor, *context: object) -> None:
    """Equal bit for bit, else the first index that differs and both values."""
    assert have.dtype == want.dtype, (name, have.dtype, want.dtype, context)
    assert have.shape == want.shape, (name, have.shape, want.shape, context)
    have, want = have.cpu().contiguous(), want.cpu().contiguous()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[have.element_size()]
    differs = have.view(integers) != want.view(integers) if have.dim() else (have != want)
    if bool(differs.any()):
        index = tuple(int(i) for i in differs.nonzero()[0])
        raise AssertionError(
            f"{name}{list(index)}: got {have[index]!r}, expected {want[index]!r}; "
            f"{int(differs.sum())} of {differs.numel()} differ; {context}"
        )
