"""Operands of a step of gated delta linear attention, and how near results must be."""

from __future__ import annotations

import torch


def operands(batch, k_heads, ratio, dtype, wide=False, dim=128, taps=4):
    v_heads = k_heads * ratio
    channels = (2 * k_heads + v_heads) * dim
    of_gates = torch.float32 if wide else dtype
    return {
        "projected": torch.randn(batch, (2 * k_heads + 2 * v_heads) * dim).to(dtype),
        "gates": torch.randn(batch, 2 * v_heads).to(dtype),
        "window": torch.randn(batch, channels, taps).to(dtype),
        "state": torch.randn(batch, v_heads, dim, dim) / 4,
        "taps": torch.randn(channels, taps).to(dtype) / 2,
        "log_decay": torch.rand(v_heads).to(of_gates),
        "bias": torch.randn(v_heads).to(of_gates),
        "norm": torch.randn(dim).to(dtype),
    }


def run(given, module, guard=lambda tensor: tensor):
    """y, the window and the state behind a step."""
    window, state = (guard(given[name].clone()) for name in ("window", "state"))
    batch, v_heads, dim, _ = state.shape
    out = guard(torch.full((batch, v_heads * dim), float("nan"), dtype=window.dtype))
    module.gated_delta_step(**(given | {"window": window, "state": state}), eps=1e-6, out=out)
    return out, window, state


def compare(have, want):
    """Equal but for the order of sums, which a rounding to 16 bits hardly ever shows."""
    dtype = have[0].dtype
    assert torch.equal(have[1], want[1])
    torch.testing.assert_close(have[2], want[2], rtol=1e-2, atol=8 * torch.finfo(dtype).eps)
    torch.testing.assert_close(have[0], want[0], rtol=1e-2, atol=16 * torch.finfo(dtype).eps)
    far = (have[0].float() - want[0].float()).abs() > 2 * torch.finfo(dtype).eps * want[0].float().abs()
    assert far.sum() <= have[0].numel() // 20
