"""`kbit bench attention`: a decoding step of attention layers, by one kernel and by PyTorch's attention.

Layers of the shipped models, between their projections: norms of heads where a model has them, rotary
embeddings, the cache, attention, and a gate behind it. PyTorch's arm has `kbit::append_heads` in front of
cuDNN's attention, where that is available, and PyTorch's own sigmoid and product behind it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import kbit.ops  # noqa: F401  (defines the ops)
from kbit.bench.correctness import require_close
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.kernel_rows import DISPATCHED
from kbit.bench.moe import copies_of

TORCH = "PyTorch"
_EPS = 1e-6
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Layer(NamedTuple):
    """Sizes of an attention layer.

    Attributes:
        heads, key_heads: of queries, and of keys and values.
        columns, turned: of a head, and how many of them are turned.
        normed, gated: whether it has norms of heads, and a gate.
    """

    heads: int
    key_heads: int
    columns: int
    turned: int
    normed: bool = False
    gated: bool = False


LAYERS = {
    "llama-3-8b": Layer(32, 8, 128, 128),
    "qwen3-30b-a3b": Layer(32, 4, 128, 128, normed=True),
    "qwen3-coder-next": Layer(16, 2, 256, 64, normed=True, gated=True),
}


@dataclass(frozen=True)
class AttentionRow:
    """Median microseconds of a layer's step; `cache_bytes` are those of its keys and values so far."""

    model: str
    batch: int
    tokens: int
    room: int
    arm: str
    us: float
    spread: float
    cache_bytes: int


class _Step(NamedTuple):
    """Of one copy of a cache: what the new token brings, and the cache."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor
    mask: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    length: torch.Tensor

    def by_one_kernel(self, scaling: float) -> torch.Tensor:
        y: torch.Tensor = torch.ops.kbit.attention_step(*self, scaling, _EPS, False, True)
        return y

    def by_torch(self, scaling: float) -> torch.Tensor:
        new = (x[:, None] for x in (self.query, self.key, self.value))
        angles = self.cos[:, None], self.sin[:, None]
        norms, cache = (self.query_norm, self.key_norm), (self.keys, self.values)
        query = torch.ops.kbit.append_heads(*new, *norms, *angles, *cache, self.length, _EPS, False, True)
        with sdpa_kernel(_BACKENDS, set_priority=True):
            y = F.scaled_dot_product_attention(
                query, *cache, attn_mask=self.mask[:, None, None], scale=scaling, enable_gqa=True
            )
        y = y[:, :, 0]
        return y if self.gate is None else y * torch.sigmoid(self.gate)


def make_steps(
    layer: Layer, batch: int, tokens: int, room: int, copies: int, device: torch.device
) -> list[_Step]:
    """Random operands: one token behind `tokens` of a cache with some room, as many caches as `copies`."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    heads, key_heads, columns, turned, normed, gated = layer
    mask = torch.zeros(batch, room, device=device, dtype=torch.bfloat16)
    mask[:, tokens + 1 :] = -math.inf
    new = normal(batch, heads, columns), normal(batch, key_heads, columns), normal(batch, key_heads, columns)
    gate = normal(batch, heads, columns) if gated else None
    query_norm, key_norm = (normal(columns), normal(columns)) if normed else (None, None)
    angles = normal(1, turned), normal(1, turned)
    length, shape = torch.tensor(tokens, device=device), (batch, key_heads, room, columns)
    caches = [(normal(*shape), normal(*shape)) for _ in range(copies)]
    return [_Step(*new, gate, query_norm, key_norm, *angles, mask, *cache, length) for cache in caches]


def layer_rows(
    model: str, batch: int, tokens: int, room: int, repeats: int, timer: Timer, device: torch.device
) -> list[AttentionRow]:
    """Measure one layer on a device, for a cache that has `tokens` and room for `room`.

    Raises:
        ValueError: the arms differ by more than rounding explains, or there is no room for another token.
    """
    if not tokens < room:
        raise ValueError(f"bench attention: --room must be more than {tokens} tokens, got {room}.")
    layer = LAYERS[model]
    of_token = 2 * 2 * batch * layer.key_heads * layer.columns  # bytes
    copies = copies_of(of_token * room, of_token * (tokens + 1), device)
    steps = make_steps(layer, batch, tokens, room, copies, device)
    scaling = layer.columns**-0.5
    problem = f"{model}, batch {batch}, {tokens} tokens"
    want = steps[0].by_torch(scaling).float()
    require_close("bench attention: kbit", steps[0].by_one_kernel(scaling), want, problem)
    ways = {TORCH: _Step.by_torch, DISPATCHED: _Step.by_one_kernel}
    arms = {
        name: Arm([functools.partial(way, step, scaling) for step in steps]) for name, way in ways.items()
    }
    return [
        AttentionRow(model, batch, tokens, room, name, timing.us, timing.spread, of_token * (tokens + 1))
        for name, timing in timer(arms, repeats).items()
    ]


def measure(
    models: Sequence[str],
    batches: Sequence[int],
    counts: Sequence[int],
    room: int | None,
    repeats: int,
    timer: Timer,
) -> Iterator[list[AttentionRow]]:
    """The rows of every problem, one after the other; `room` None: one token more than there are."""
    device = torch.device("cuda")
    for model in models:
        for batch in batches:
            for tokens in counts:
                yield layer_rows(model, batch, tokens, room or tokens + 1, repeats, timer, device)


def speedup(rows: Sequence[AttentionRow], row: AttentionRow) -> float:
    """How many times as fast as PyTorch's arm of the same problem a row is."""
    key = (row.model, row.batch, row.tokens, row.room)
    base = next(r for r in rows if r.arm == TORCH and (r.model, r.batch, r.tokens, r.room) == key)
    return base.us / row.us


def as_json(rows: Sequence[AttentionRow]) -> list[dict[str, Any]]:
    """Rows as JSON objects, with bytes of the cache over time, and the ratio to PyTorch's arm."""
    return [
        asdict(row)
        | {"us": round(row.us, 3), "spread": round(row.spread, 4)}
        | {"gb_s": round(row.cache_bytes / row.us / 1e3, 1), "vs_torch": round(speedup(rows, row), 3)}
        for row in rows
    ]
