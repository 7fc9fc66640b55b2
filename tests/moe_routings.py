"""Routings that a mixture of experts has to bear, and what its layer is measured against."""

import torch
import torch.nn.functional as F


def uniform(tokens, choices, experts, generator):
    scores = torch.rand(tokens, experts, generator=generator)
    return scores.topk(min(choices, experts), dim=-1).indices


def skewed(tokens, choices, experts, generator):
    """Zipf: expert e is chosen about 1 / (e + 1) as often as the first."""
    popularity = 1.0 / torch.arange(1, experts + 1)
    return torch.multinomial(popularity.expand(tokens, -1), min(choices, experts), generator=generator)


def one_takes_all(tokens, choices, experts, generator):
    return torch.full((tokens, choices), experts - 1)


def few(tokens, choices, experts, generator):
    """Two experts have all rows, the others none; tokens choose one several times."""
    return torch.randint(0, 2, (tokens, choices), generator=generator) * (experts // 2)


def not_all_mine(tokens, choices, experts, generator):
    """A third of the choices belong to other devices."""
    ids = torch.randint(0, experts, (tokens, choices), generator=generator)
    foreign = torch.tensor([experts, experts + 7, -1])[torch.randint(0, 3, ids.shape, generator=generator)]
    return torch.where(torch.rand(ids.shape, generator=generator) < 0.33, foreign, ids)


def nobodys(tokens, choices, experts, generator):
    return torch.full((tokens, choices), experts)


ROUTINGS = (uniform, skewed, one_takes_all, few, not_all_mine, nobodys)


def routed(routing, tokens, choices, experts, seed=0):
    """int64 ids [tokens, choices]."""
    return routing(tokens, choices, experts, torch.Generator().manual_seed(seed))


def aligned(ids, experts):
    """What moe_align has to return, by Python's stable sort."""
    flat = [one if 0 <= one < experts else experts for one in ids.flatten().tolist()]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    source = torch.tensor([place // ids.shape[1] for place in order], dtype=torch.int32)
    bounds = torch.tensor([sum(one < e for one in flat) for e in range(experts + 1)], dtype=torch.int32)
    inverse = torch.empty(len(flat), dtype=torch.int32)
    inverse[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(flat), dtype=torch.int32)
    return source, bounds, inverse.view(ids.shape)


def layer_in_float64(gate_up, down, x, ids, weights):
    """The mixture, expert by expert, in float64: down(silu(gate) * up), weighted and summed."""
    x, weights = x.double(), weights.double()
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        if not 0 <= expert < len(gate_up):
            continue
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(x[token], gate_up[expert].double()).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, down[expert].double())
        out.index_add_(0, token, y * weights[token, choice, None])
    return out
