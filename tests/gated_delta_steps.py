"""Operands of gated delta linear attention, and how near results must be."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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


def in_order(given, k_heads):
    """The same operands, not by heads of keys: all queries, all keys, and so on."""
    dim, v_heads = len(given["taps"]) // (2 * k_heads + len(given["bias"])), len(given["bias"])
    ratio = v_heads // k_heads

    def ordered(tensor, sizes):
        parts = tensor.unflatten(-1, (k_heads, -1)).split(sizes, -1)
        return torch.cat([part.flatten(-2) for part in parts], -1)

    projected = ordered(given["projected"], [dim, dim, ratio * dim, ratio * dim])
    return given | {"projected": projected, "gates": ordered(given["gates"], [ratio, ratio])}


def run(given, module, guard=lambda tensor: tensor, by_heads=True):
    """y, the window and the state behind a step."""
    window, state = (guard(given[name].clone()) for name in ("window", "state"))
    batch, v_heads, dim, _ = state.shape
    out = guard(torch.full((batch, v_heads * dim), float("nan"), dtype=window.dtype))
    written = {"window": window, "state": state, "out": out}
    module.gated_delta_step(**(given | written), eps=1e-6, by_heads=by_heads)
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
        "count": None if count is None else torch.as_tensor(count).expand(batch).clone(),
    }


def run_inputs(given, module, guard=lambda tensor: tensor, by_heads=True):
    """The results of `gated_delta_inputs`, which were NaN before."""
    heads = gated_delta_schemas.check_inputs(**given)
    out = gated_delta_schemas.inputs(given["projected"], given["taps"], heads)
    out = tuple(guard(torch.full_like(tensor, float("nan"))) for tensor in out)
    module.gated_delta_inputs(*given.values(), by_heads, heads, out)
    return out


def of_rule(batch, tokens, k_heads, ratio, dtype, before=True, dim=128, alike=0.0):
    """Operands of `kbit::gated_delta_rule`: some heads forget within a few tokens, others hardly ever.

    alike: how much longer what all keys of a head have in common is than what they have not.
    """
    v_heads = k_heads * ratio
    key = torch.randn(batch, tokens, k_heads, dim) + alike * torch.randn(batch, 1, k_heads, dim)
    query, key = (F.normalize(x, dim=-1).to(dtype) for x in (torch.randn_like(key), key))
    return {
        "query": query,
        "key": key,
        "value": torch.randn(batch, tokens, v_heads, dim).to(dtype),
        "beta": torch.rand(batch, tokens, v_heads).to(dtype),
        "decay": -torch.rand(batch, tokens, v_heads) * 10.0 ** -torch.arange(v_heads).fmod(4),
        "before": torch.randn(batch, v_heads, dim, dim) / 8 if before else None,
    }


def run_rule(given, module, guard=lambda tensor: tensor):
    """y and the state of `gated_delta_rule`, which were NaN before."""
    heads = gated_delta_schemas.check_rule(**given)
    out = gated_delta_schemas.behind(given["value"])
    out = tuple(guard(torch.full_like(tensor, float("nan"))) for tensor in out)
    module.gated_delta_rule(*given.values(), heads, out)
    return out


def token_by_token(query, key, value, beta, decay, before):
    """y and the state in float64."""
    ratio = value.shape[2] // query.shape[2]
    query, key = (x.double().repeat_interleave(ratio, 2) for x in (query, key))
    state = query.new_zeros(*value[:, 0].shape, value.shape[3]) if before is None else before.double()
    y = torch.empty_like(value, dtype=torch.float64)
    for token in range(value.shape[1]):
        state = state * decay[:, token, :, None, None].double().exp()
        change = value[:, token].double() - (state * key[:, token, ..., None]).sum(-2)
        change *= beta[:, token, :, None].double()
        state = state + key[:, token, ..., None] * change[..., None, :]
        y[:, token] = (state * query[:, token, ..., None]).sum(-2)
    return y / value.shape[3] ** 0.5, state


def compare_rule(have, given, times=1):
    """Rows of y, and columns of keys of the state, are as near to the exact ones as 16 bits are.

    What goes into a product is rounded to 16 bits: the state, what it knows of keys, the inverse and the
    change, each by half an eps of itself. Rounded values add up like random ones: four of them, and y's own,
    are an eps and a bit. A row may be far smaller than what it is summed from, which is the bound's scale.

    times: as much more, of keys that are alike: changes are then differences of values nearly as large.
    """
    dtype = given["value"].dtype
    eps = times * torch.finfo(dtype).eps * (16 if dtype == torch.float32 else 1)  # sums are rounded, too
    for mine, exact in zip(have, token_by_token(**given), strict=True):
        errors = (mine.double() - exact).norm(dim=-1)
        assert (errors <= 3 * eps * exact.norm(dim=-1).amax((1, 2), keepdim=True)).all()
        assert errors.norm() <= eps * exact.norm()


def compare_inputs(have, want):
    """Equal but for a rounding to 16 bits now and then, and in float32 for the last bits."""
    eps = torch.finfo(want[0].dtype).eps
    for mine, other in zip(have[:4], want[:4], strict=True):
        torch.testing.assert_close(mine, other, rtol=2 * eps, atol=2 * eps)
        assert (mine != other).sum() <= 2 + mine.numel() // 50
    torch.testing.assert_close(have[4], want[4], rtol=1e-5, atol=1e-6)
    assert torch.equal(have[5], want[5])
