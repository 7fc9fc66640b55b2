"""Whether a layer's weight has the sizes that the layer states: quantized ones are built by these."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from kbit.format.words import at


def other_sizes(module: nn.Linear | nn.Embedding) -> str | None:
    """How a matrix differs from the sizes that its layer states; None if it does not, or is no matrix.

    PyTorch's layers compute by the weight alone, so one that was cut or grown in place still works.
    """
    stated = (
        (module.out_features, module.in_features)
        if isinstance(module, nn.Linear)
        else (module.num_embeddings, module.embedding_dim)
    )
    found = tuple(module.weight.shape)
    return None if len(found) != 2 or found == stated else f"its weight is {found}, its sizes say {stated}"


def refuse_other_sizes(method: str, module: nn.Linear | nn.Embedding, name: str) -> None:
    """Raise ValueError if a layer's weight has other sizes than it states, or none; `method` quantizes it."""
    if is_lazy(module.weight):
        raise ValueError(f"{method}: a lazy layer has no sizes{at(name)}. Call it once, which gives it some.")
    if reason := other_sizes(module):
        raise ValueError(f"{method}: {reason}{at(name)}. Set the layer's attributes to the weight's sizes.")
