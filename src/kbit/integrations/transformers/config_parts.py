"""The configs that a model's config holds: of its text model, of its vision tower, and so on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def all_of(config: Any) -> Iterator[Any]:
    """A model's config and those of its parts: the order in which setting them leaves each as it was set."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if part is not None:
            yield from all_of(part)
