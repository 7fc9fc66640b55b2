"""RMS norm in PyTorch: the definition that the kernel is tested against."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    plus_one: bool,
    round_first: bool,
    out: torch.Tensor,
    added: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> None:
    """`kbit::rms_norm` into `out`; x is [..., D]. With `added` and `total`, like x, `kbit::add_rms_norm`."""
    if added is not None and total is not None:
        x = torch.add(x, added, out=total)
    wide = x.float()
    quotient = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    factor = weight.float() + 1.0 if plus_one else weight.float()
    quotient = quotient.to(x.dtype).float() if round_first else quotient
    out.copy_(quotient * factor)
