"""What is done to models that transformers' server loads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from kbit.cli.model_folder import explained_loading, refuse_missing
from kbit.format.model_files import CONFIG_NAME, read_config

# Whether it is the server that loads: others of this process draw what a model lacks.
_serving: ContextVar[bool] = ContextVar("serving", default=False)


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


def load_as_other_commands() -> None:
    """Have the server refuse, as `kbit generate`, what cannot be loaded and models that lack weights.

    transformers draws those at random, and would answer from them.
    """
    from transformers import PreTrainedModel
    from transformers.cli.serving.model_manager import ModelManager

    load = ModelManager._load_model

    @functools.wraps(load)
    def loaded(self: Any, name: str, *arguments: Any, **named: Any) -> Any:
        folder = Path(name.partition("@")[0])  # what follows is a revision
        before = _serving.set(True)
        try:
            with explained_loading(folder, read_config(folder) if (folder / CONFIG_NAME).is_file() else {}):
                return load(self, name, *arguments, **named)
        finally:
            _serving.reset(before)

    ModelManager._load_model = loaded
    PreTrainedModel.from_pretrained = classmethod(_whole(PreTrainedModel.from_pretrained.__func__))


def _whole(load: Callable[..., Any]) -> Callable[..., Any]:
    """A model class's from_pretrained, which raises ValueError for a served model that lacks weights."""

    @functools.wraps(load)
    def loaded(kind: type, name: Any, /, *arguments: Any, **named: Any) -> Any:
        if not _serving.get():
            return load(kind, name, *arguments, **named)
        asked = named.pop("output_loading_info", False)
        model, found = load(kind, name, *arguments, output_loading_info=True, **named)
        refuse_missing(name, found["missing_keys"])
        return (model, found) if asked else model

    return loaded
