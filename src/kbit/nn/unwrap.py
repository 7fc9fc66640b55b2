"""The model inside of what torch.compile returned, where its names, its class and its attributes are."""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """The model that torch.compile wrapped, or `model` where it did not."""
    # Importing the class would import torch._dynamo.
    return model._orig_mod if type(model).__name__ == "OptimizedModule" else model
