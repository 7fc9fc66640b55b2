"""Layers and experts that a config promises, held against the tensors that there are for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kbit.format.model_files import CONFIG_NAME, read_index
from kbit.format.words import counted

# num_hidden_layers, n_layer, num_experts, n_routed_experts, depth, ... of whatever part of a model.
_COUNT = re.compile(r"(^|_)(layers?|experts|blocks|depth)$")
_EXPERTS = "experts"
# A model of so many is made in seconds, and then told by name what it lacks.
_QUICKLY_MADE = 1024


def refuse_more_than_tensors(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config of a model that would take forever to make, and for which there can be no weights.

    Args:
        folder: a model folder; headers are read only where the config has a large count.
        config: the content of its config.json.

    Raises:
        ValueError: the config has more layers or experts than the files have tensors.
    """
    large = {name: count for name, count in _counts(config) if count > _QUICKLY_MADE}
    if not large:
        return
    index = read_index(folder)
    # Experts may be stacked in one tensor, or be rows of a table; their router has a row for each.
    most = sum(info.shape[0] if len(info.shape) > 2 else 1 for info in index.values())
    rows = max((info.shape[0] for info in index.values() if info.shape), default=0)
    for name, count in large.items():
        if count > (max(most, rows) if name.endswith(_EXPERTS) else most):
            raise ValueError(
                f"{folder / CONFIG_NAME}: {name} is {count}, and the folder has only "
                f"{counted(len(index), 'tensor')}. "
                f"Fetch config.json again, or correct it."
            )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(name, count) of a config and of those inside of it, such as text_config."""
    # Every Doge's config has 16384 experts, also of the models without any.
    unused = (_EXPERTS,) if config.get("is_moe") is False else ()
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _counts(value)
        elif type(value) is int and _COUNT.search(name) and not name.endswith(unused):
            yield name, value
