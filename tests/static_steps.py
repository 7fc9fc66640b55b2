"""Steps of models with caches of a fixed size, for tests of what stands in for parts of their layers."""

from __future__ import annotations

import torch
from transformers import StaticCache

from kbit.integrations.transformers import attention_steps, static_caches
from kbit.integrations.transformers.attention import shared_heads
from kbit.integrations.transformers.cache_argument import with_cache


def take_caches_of_a_cpu(monkeypatch):
    """Caches on a CPU count as those of a GPU."""

    def appends(layer, key, value):
        return layer.is_initialized and key.dtype == layer.keys.dtype

    for module in (static_caches, attention_steps):
        monkeypatch.setattr(module, "appends", appends)


def heads_alone(model):
    """A context for steps of a model whose layers run by their own forward, with attention as kbit has it."""
    return shared_heads()


@torch.no_grad()
def steps(model, run, batch=2, padding=0):
    """Logits of three tokens behind a prompt, with a cache that is there already, and its length then.

    Args:
        model: a causal language model.
        run: a context for its steps.
        batch: sequences.
        padding: tokens in front of the last one's that are masked; a model gets no mask if there are none.
    """
    cache = StaticCache(config=model.config, max_cache_len=16)
    device = model.device
    there = torch.ones(batch, 5, dtype=torch.long, device=device)
    there[-1, :padding] = 0

    def masks():
        return {"attention_mask": there} if padding else {}

    model(torch.arange(2, 2 + 5 * batch, device=device).view(batch, 5), **masks(), **with_cache(cache))
    token, logits = torch.arange(7, 7 + batch, device=device).view(batch, 1), []
    for _ in range(3):
        there = torch.cat((there, there.new_ones(batch, 1)), 1)
        with run(model):
            logits.append(model(token, **masks(), **with_cache(cache)).logits)
        token = token + 3
    return torch.stack(logits), int(cache.get_seq_length())
