"""Rotary position embedding in PyTorch: the definitions that the kernels are tested against."""

from __future__ import annotations

import torch


def rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    out_query: torch.Tensor,
    out_key: torch.Tensor,
    interleaved: bool = False,
) -> None:
    """`kbit::rotary` into outputs [B, T, heads, D]."""
    if interleaved:
        cos, sin = (angles[..., : angles.shape[-1] // 2].repeat(1, 1, 2) for angles in (cos, sin))
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    for x, out in ((query, out_query), (key, out_key)):
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        if interleaved:
            turned = torch.cat((turned[..., ::2], turned[..., 1::2]), -1)
        low, high = turned.chunk(2, -1)
        turned = turned * cos + torch.cat((-high, low), -1) * sin
        out.copy_(torch.cat((turned, rest), -1).transpose(1, 2))


def rotary_angles(
    frequencies: torch.Tensor,
    positions: torch.Tensor,
    factor: float,
    out_cos: torch.Tensor,
    out_sin: torch.Tensor,
) -> None:
    """`kbit::rotary_angles` into outputs [B, T, R]."""
    angles = (positions[..., None].float() * frequencies).repeat(1, 1, 2)
    out_cos.copy_(angles.cos() * factor)
    out_sin.copy_(angles.sin() * factor)
