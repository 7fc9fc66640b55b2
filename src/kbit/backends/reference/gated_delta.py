"""Gated delta linear attention in PyTorch: the definitions that kernels are tested against."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kbit.ops.gated_delta_schemas import Heads, heads_of_keys

_CHUNK = 64  # tokens


def gated_delta_step(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor,
    state: torch.Tensor,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    by_heads: bool,
    out: torch.Tensor,
) -> None:
    """`kbit::gated_delta_step` into `out` [B, V * D]; rounds where transformers' modules do."""
    batch, v_heads, dim, _ = state.shape
    k_heads = heads_of_keys(projected, state)
    ratio = v_heads // k_heads
    heads = Heads(k_heads, v_heads, dim)
    mixed, gate, beta, alpha = _parts(projected, gates, by_heads, heads)

    token = mixed[..., None]
    window.copy_(torch.cat((window[..., 1:], token), -1))
    channels = F.silu((window.float() * taps.float()).sum(-1).to(projected.dtype)).float()
    query, key, value = channels.split([k_heads * dim, k_heads * dim, v_heads * dim], -1)
    query, key = (x.view(batch, k_heads, dim).repeat_interleave(ratio, 1) for x in (query, key))
    query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))

    decay = (-log_decay.float().exp() * F.softplus(alpha.float() + bias.float())).exp()
    state *= decay[..., None, None]
    known = (state * key[..., None]).sum(-2)
    change = (value.view(batch, v_heads, dim) - known) * beta.sigmoid().float()[..., None]
    state += key[..., None] * change[..., None, :]
    y = (state * (query / dim**0.5)[..., None]).sum(-2).to(projected.dtype).float()

    out.copy_(_gated_norm(y, gate.view_as(y), norm, eps).view(batch, -1))


def _parts(
    projected: torch.Tensor, gates: torch.Tensor, by_heads: bool, heads: Heads
) -> tuple[torch.Tensor, ...]:
    """Of [..., columns]: all queries, keys and values; gates of the output; betas; alphas."""
    if not by_heads:
        opening = heads.values * heads.columns
        return *projected.split([heads.channels, opening], -1), *gates.split(heads.values, -1)
    ratio, dim = heads.values // heads.keys, heads.columns
    parts = projected.unflatten(-1, (heads.keys, -1)).split([dim, dim, ratio * dim, ratio * dim], -1)
    *mixed, opening = (part.flatten(-2) for part in parts)
    more = (part.flatten(-2) for part in gates.unflatten(-1, (heads.keys, -1)).split(ratio, -1))
    return torch.cat(mixed, -1), opening, *more


def _gated_norm(y: torch.Tensor, gate: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The gated norm of rows, float32."""
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (norm * y.to(norm.dtype)).float() * F.silu(gate.float())


def gated_delta_inputs(
    projected: torch.Tensor,
    gates: torch.Tensor,
    window: torch.Tensor | None,
    taps: torch.Tensor,
    log_decay: torch.Tensor,
    bias: torch.Tensor,
    count: torch.Tensor | None,
    by_heads: bool,
    heads: Heads,
    out: tuple[torch.Tensor, ...],
) -> None:
    """`kbit::gated_delta_inputs` into `out`; rounds where transformers' modules do."""
    (batch, tokens, _), (k_heads, v_heads, dim) = projected.shape, heads
    mixed, _, beta, alpha = _parts(projected, gates, by_heads, heads)
    mixed = mixed.transpose(1, 2)
    reach, last = taps.shape[1], min(tokens, taps.shape[1])
    before = mixed.new_zeros(*mixed.shape[:2], reach) if window is None else window
    known = torch.cat((before, mixed), -1)
    shifted = known[..., 1:].float().unfold(-1, reach, 1)
    channels = F.silu((shifted * taps.float()[:, None]).sum(-1).to(projected.dtype)).transpose(1, 2)
    made = channels.split([k_heads * dim, k_heads * dim, v_heads * dim], -1)
    query, key, value = (part.reshape(batch, tokens, -1, dim) for part in made)
    query, key = (x.float() * torch.rsqrt(x.float().square().sum(-1, True) + 1e-6) for x in (query, key))
    ends = beta.new_full((batch, 1), tokens, dtype=torch.int64) if count is None else count[:, None]
    ends = ends.clamp(0, tokens)
    there = (torch.arange(tokens, device=mixed.device) < ends)[..., None]
    of_last = ends + torch.arange(reach - last, reach, device=mixed.device)
    results = (
        query,
        key,
        value,
        beta.sigmoid().where(there, 0),
        (-log_decay.float().exp() * F.softplus(alpha.float() + bias.float())).where(there, 0),
        known.take_along_dim(of_last[:, None], -1),
    )
    for to, result in zip(out, results, strict=True):
        to.copy_(result)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    before: torch.Tensor | None,
    heads: Heads,
    out: tuple[torch.Tensor, ...],
) -> None:
    """`kbit::gated_delta_rule` into `out`: by chunks of tokens, in float32."""
    ratio, tokens, (y, state) = heads.values // heads.keys, query.shape[1], out
    query, key = (x.repeat_interleave(ratio, 2) for x in (query, key))
    # [B, V, chunks, chunk, ..]; tokens that are not there change nothing.
    q, k, v = (_chunked(x) for x in (query, key, value))
    b, g = (_chunked(x[..., None]) for x in (beta, decay))
    total = g.cumsum(-2)
    factors = (total - total.mT).tril().exp().tril()
    # The inverse of 1 and what is below the diagonal, by columns, for all chunks at once.
    known = (b * (k @ k.mT) * factors).tril(-1)
    betas = b.squeeze(-1).diag_embed()
    solved = torch.linalg.solve_triangular(known, betas, upper=False, unitriangular=True)
    scores, kept, left = (q @ k.mT) * factors, total.exp(), (total[..., -1:, :] - total).exp()
    state.zero_() if before is None else state.copy_(before)
    for chunk in range(q.shape[2]):
        own = (slice(None), slice(None), chunk)
        change = solved[own] @ (v[own] - kept[own] * (k[own] @ state))
        found = kept[own] * (q[own] @ state) + scores[own] @ change
        first = chunk * _CHUNK
        y[:, first : first + _CHUNK] = found[:, :, : tokens - first].transpose(1, 2) / heads.columns**0.5
        state.copy_(kept[own][..., -1:, :] * state + (left[own] * k[own]).mT @ change)


def _chunked(x: torch.Tensor) -> torch.Tensor:
    """[B, T, V, ..] as float32 [B, V, chunks, chunk, ..], with zeros behind the last token."""
    x = F.pad(x.float(), (0, 0, 0, 0, 0, -x.shape[1] % _CHUNK)).transpose(1, 2)
    return x.unflatten(2, (-1, _CHUNK))


def gated_delta_output(
    x: torch.Tensor,
    projected: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    by_heads: bool,
    heads: Heads,
    out: torch.Tensor,
) -> None:
    """`kbit::gated_delta_output` into `out`."""
    _, gates, *_ = _parts(projected, projected[..., : 2 * heads.values], by_heads, heads)
    out.copy_(_gated_norm(x.float(), gates.reshape(x.shape), norm, eps))
