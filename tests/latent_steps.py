"""Operands of `kbit::latent_attention_step`, and what it is to give, in float64."""

from __future__ import annotations

import math

import torch

NAMES = ("query", "absorbed", "latent", "norm", "cos", "sin", "mask", "latents", "keys", "length")
EPS = 1e-6
HOW = (0.1, EPS, False, True, True)  # scaling, eps, plus_one, round_first, interleaved
ROOM = 70


def operands(
    batch, heads, columns, turned, dtype=torch.float32, device="cpu", length=3, mask=True, room=ROOM
):
    """The op's tensors by name; what the cache does not hold yet is NaN."""

    def normal(*shape):
        return torch.randn(shape).to(device, dtype)

    product = normal(batch, heads, columns + turned + 8)
    latents, keys = normal(batch, room, columns), normal(batch, room, turned)
    for cache in (latents, keys):
        cache[:, length:] = math.nan
    masks = normal(batch, room) if mask else None
    if masks is not None and length > 1:
        masks[-1, : length // 2] = -math.inf
    given = (product[..., columns + 8 :], product[..., :columns], normal(batch, columns + turned))
    angles = torch.randn(2, 1, turned // 2).repeat(1, 1, 2).to(device, dtype)
    at = torch.tensor(length, device=device)
    return dict(zip(NAMES, (*given, normal(columns), *angles, masks, latents, keys, at), strict=True))


def turned(x, cos, sin, interleaved):
    """As transformers turns, in float64: [..., R]."""
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


def expected(query, absorbed, latent, norm, cos, sin, mask, latents, keys, length, how):
    """In float64, and a bound of what rounding to the dtype may change: weights, new rows, results."""
    scaling, eps, plus_one, _, interleaved = how
    eps_of_dtype = torch.finfo(query.dtype).eps
    given = (query, absorbed, latent, norm, cos, sin, latents, keys)
    q, a, new, weight, cos, sin, latents, keys = (x.double().cpu() for x in given)
    columns, room, count = a.shape[2], latents.shape[1], int(length)
    c = new[:, :columns]
    c = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + eps) * (weight + 1 if plus_one else weight)
    if count < room:
        latents[:, count], keys[:, count] = c, turned(new[:, columns:], cos, sin, interleaved)
    latents, keys = latents[:, : count + 1], keys[:, : count + 1]
    q = turned(q, cos[:, None], sin[:, None], interleaved)
    products = [(a, latents), (q, keys)]
    scores = sum(x @ y.mT for x, y in products) * scaling
    size = sum(x.abs() @ y.abs().mT for x, y in products) * scaling
    if mask is not None:
        scores = scores + mask.double().cpu()[:, None, : count + 1]
        size = size + mask.double().cpu()[:, None, : count + 1].abs().nan_to_num(posinf=0.0)
    p = scores.softmax(-1).nan_to_num(0.0)
    y = p @ latents
    wrong = (4 * eps_of_dtype + (columns + keys.shape[2]) * 2.0**-23) * size.amax(-1, keepdim=True)
    bound = (p @ latents.abs()) * (2 * (wrong.expm1() + 2 * eps_of_dtype)) + y.abs() * eps_of_dtype
    return y, bound, latents, keys


def require(y, latents, keys, tensors, how=HOW):
    """The op's result and its caches, made from `tensors`, are right as far as rounding allows."""
    want, bound, its_latents, its_keys = expected(**tensors, how=how)
    assert y.shape == tensors["absorbed"].shape
    assert y.is_contiguous()
    assert bool(((y.double().cpu() - want).abs() <= bound).all())
    count = its_latents.shape[1]
    tolerance = {"rtol": 4 * torch.finfo(y.dtype).eps, "atol": 4 * torch.finfo(y.dtype).eps}
    torch.testing.assert_close(latents[:, :count].double().cpu(), its_latents, **tolerance)
    torch.testing.assert_close(keys[:, :count].double().cpu(), its_keys, **tolerance)
    for cache, name in ((latents, "latents"), (keys, "keys")):
        behind = slice(count, None)
        assert torch.equal(cache[:, behind].isnan(), tensors[name][:, behind].isnan())
        before = slice(0, min(int(tensors["length"]), count))
        assert torch.equal(cache[:, before], tensors[name][:, before])
