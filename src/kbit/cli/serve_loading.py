"""What is done to models that transformers' server loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def when_loaded(act: Callable[[Any], object]) -> None:
    """Have the server call `act` with each model that it loads, before it takes requests for it."""
    from transformers.cli.serving.model_manager import ModelManager

    load = ModelManager._load_model

    @functools.wraps(load)
    def loaded(self: Any, *arguments: Any, **named: Any) -> Any:
        model = load(self, *arguments, **named)
        act(model)
        return model

    ModelManager._load_model = loaded
