"""Which experts tokens choose, where no router says so."""

from __future__ import annotations

import torch

ROUTINGS = ("uniform", "zipf")


def chosen_experts(
    routing: str, tokens: int, experts: int, chosen: int, generator: torch.Generator, order: torch.Generator
) -> torch.Tensor:
    """Different experts for every token, at random.

    Args:
        routing: "uniform", or "zipf": expert number r by popularity is chosen about 1 / r as often as the
            first.
        tokens: T.
        experts: how many there are.
        chosen: U, of a token.
        generator: draws the experts.
        order: draws which expert has which popularity, before.

    Returns:
        int64 [T, U].
    """
    ranks = torch.arange(1, experts + 1, dtype=torch.float32)
    popularity = torch.ones_like(ranks) if routing == "uniform" else 1 / ranks
    popularity = popularity[torch.randperm(experts, generator=order)]
    return torch.multinomial(popularity.expand(tokens, -1), chosen, generator=generator)
