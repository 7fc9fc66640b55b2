"""Which linear layers a block of a model runs, and how often; from `kbit.bench.shapes`."""

from __future__ import annotations

from dataclasses import dataclass

from kbit.bench.shapes import MODELS, SHAPES, LayerShape

# Experts that a token is sent to.
EXPERTS_PER_TOKEN = {"qwen3-coder-next": 10}


@dataclass(frozen=True)
class ModelLayers:
    """The layers of one block. Every dense one runs on all tokens, an expert's on those sent to it."""

    name: str
    dense: tuple[LayerShape, ...]
    experts: tuple[LayerShape, ...] = ()
    experts_per_token: int = 0


def layers_of(name: str) -> ModelLayers:
    """The layers of a model.

    Raises:
        ValueError: unknown model.
    """
    if name not in MODELS:
        raise ValueError(f"workload: unknown model {name}; known: {', '.join(MODELS)}.")
    here = [shape for shape in SHAPES if shape.model == name]
    return ModelLayers(
        name,
        tuple(shape for shape in here if shape.experts is None),
        tuple(shape for shape in here if shape.experts is not None),
        EXPERTS_PER_TOKEN.get(name, 0),
    )


def active_experts(experts: int, per_token: int, tokens: int) -> tuple[float, float]:
    """How many experts get any of `tokens` tokens, and how many tokens each of those gets; expected values.

    Routing is uniform and tokens are independent: an expert is missed with (1 - per_token / experts) ** M.
    """
    active = experts * (1 - (1 - per_token / experts) ** tokens)
    return active, tokens * per_token / active
