"""Operands of gated delta linear attention, and how near results must be."""

from __future__ import annotations

import torch

from kbit.ops import gated_delta_schemas


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


def prompt(batch, tokens, k_heads, ratio, dtype, wide=False, dim=128, taps=4, window=True, count=None):
    """Operands of `kbit::gated_delta_inputs`; projections and gates are views of one tensor, as in models."""
    given = operands(batch, k_heads, ratio, dtype, wide, dim, taps)
    columns, more = (given[name].shape[1] for name in ("projected", "gates"))
    both = torch.randn(batch, tokens, columns + -columns % 8 + more + -more % 8).to(dtype)
    return {
        "projected": both[..., :columns],
        "gates": both[..., -more:],
        "window": given["window"] if window else None,
        **{name: given[name] for name in ("taps", "log_decay", "bias")},
        "count": None if count is None else torch.tensor([count]),
    }


def run_inputs(given, module, guard=lambda tensor: tensor):
    """The results of `gated_delta_inputs`, which were NaN before."""
    heads = gated_delta_schemas.check_inputs(**given)
    out = gated_delta_schemas.inputs(given["projected"], given["taps"], heads)
    out = tuple(guard(torch.full_like(tensor, float("nan"))) for tensor in out)
    module.gated_delta_inputs(*given.values(), heads, out)
    return out


def compare_inputs(have, want):
    """Equal but for a rounding to 16 bits now and then, and in float32 for the last bits."""
    eps = torch.finfo(want[0].dtype).eps
    for mine, other in zip(have[:4], want[:4], strict=True):
        torch.testing.assert_close(mine, other, rtol=2 * eps, atol=2 * eps)
        assert (mine != other).sum() <= 2 + mine.numel() // 50
    torch.testing.assert_close(have[4], want[4], rtol=1e-5, atol=1e-6)
    assert torch.equal(have[5], want[5])
