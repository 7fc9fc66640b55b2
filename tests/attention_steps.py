"""Operands of `kbit::attention_step`, and what it is to give, in float64."""

from __future__ import annotations

import math

import torch

NAMES = (
    *("query", "key", "value", "gate", "query_norm", "key_norm", "cos", "sin", "mask", "keys", "values"),
    "length",
)
HOW = (0.1, 1e-6, False, True)  # scaling, eps, plus_one, round_first
ROOM = 70


def operands(
    batch,
    heads,
    columns,
    turned,
    dtype=torch.float32,
    device="cpu",
    length=3,
    room=ROOM,
    mask=True,
    gate=False,
    norms=True,
):
    """The op's tensors by name, of (query heads, heads of keys); what the cache does not hold yet is NaN."""

    def normal(*shape):
        return torch.randn(shape).to(device, dtype)

    of_query, of_key = heads
    product = normal(batch, of_query, 2 * columns)  # as models have it: each head's gate behind it
    new = [normal(batch, 2 * of_key, columns)[:, begin::2] for begin in (0, 1)]
    weights = [normal(columns) if norms else None for _ in range(2)]
    angles = torch.randn(2, 1, turned).to(device, dtype)
    cache = [normal(batch, of_key, room, columns) for _ in range(2)]
    for one in cache:
        one[:, :, length:] = math.nan
    masks = normal(batch, room) if mask else None
    if masks is not None and length > 1:
        masks[-1, : length // 2] = -math.inf
    at = torch.tensor(length, device=device)
    gates = product[..., columns:] if gate else None
    return dict(
        zip(NAMES, (product[..., :columns], *new, gates, *weights, *angles, masks, *cache, at), strict=True)
    )


def _normed(x, weight, eps, plus_one):
    if weight is None:
        return x
    weight = weight.double().cpu() + plus_one
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _turned(x, cos, sin):
    turned = cos.shape[-1]
    low, high = x[..., :turned].chunk(2, -1)
    front = x[..., :turned] * cos[:, None] + torch.cat((-high, low), -1) * sin[:, None]
    return torch.cat((front, x[..., turned:]), -1)


def expected(query, key, value, gate, query_norm, key_norm, cos, sin, mask, keys, values, length, how):
    """In float64: the result, a bound of what rounding to the dtype may change, and the caches."""
    scaling, eps, plus_one, _ = how
    unit = torch.finfo(query.dtype).eps
    q, new, v, cos, sin, keys, values = (
        x.double().cpu() for x in (query, key, value, cos, sin, keys, values)
    )
    q = _turned(_normed(q, query_norm, eps, plus_one), cos, sin)
    new = _turned(_normed(new, key_norm, eps, plus_one), cos, sin)
    room, count = keys.shape[2], int(length)
    if count < room:
        keys[:, :, count], values[:, :, count] = new, v
    keys, values = keys[:, :, : count + 1], values[:, :, : count + 1]
    shared = q.shape[1] // keys.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (keys, values))
    scores = (k @ q[..., None])[..., 0] * scaling
    size = (k.abs() @ q.abs()[..., None])[..., 0] * scaling
    if mask is not None:
        its_mask = mask.double().cpu()[:, None, : count + 1]
        scores, size = scores + its_mask, size + its_mask.abs().nan_to_num(posinf=0.0)
    p = scores.softmax(-1).nan_to_num(0.0)[:, :, None]
    y = (p @ v)[:, :, 0]
    # Turned vectors are rounded several times, and may be sums that cancel.
    wrong = ((8 * unit + k.shape[-1] * 2.0**-23) * size.amax(-1, keepdim=True)).expm1()
    bound = (p @ v.abs())[:, :, 0] * (2 * (wrong + 2 * unit)) + y.abs() * unit
    if gate is not None:
        open_ = torch.sigmoid(gate.double().cpu())
        y, bound = y * open_, (bound + 2 * unit * y.abs()) * open_ + 2.0**-24
    return y, bound, keys, values


def require(y, keys, values, tensors, how=HOW):
    """The op's result and its caches, made from `tensors`, are right as far as rounding allows."""
    want, bound, its_keys, its_values = expected(**tensors, how=how)
    assert y.shape == tensors["query"].shape
    assert y.is_contiguous()
    off = (y.double().cpu() - want).abs()
    assert bool((off <= bound).all()), (off / bound).max()
    count, unit = its_keys.shape[2], torch.finfo(y.dtype).eps
    torch.testing.assert_close(keys[:, :, :count].double().cpu(), its_keys, rtol=4 * unit, atol=16 * unit)
    assert torch.equal(values[:, :, :count].double().cpu(), its_values)
    for cache, name in ((keys, "keys"), (values, "values")):
        behind = slice(count, None)
        assert torch.equal(cache[:, :, behind].isnan(), tensors[name][:, :, behind].isnan())
        before = slice(0, min(int(tensors["length"]), count))
        assert torch.equal(cache[:, :, before], tensors[name][:, :, before])
