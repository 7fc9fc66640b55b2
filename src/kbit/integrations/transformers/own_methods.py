"""Methods of a model that are its own, in place of its class's: how `generate` is had to do otherwise."""

from __future__ import annotations

import types
from typing import Any


def generating(model: Any) -> Any:
    """The model whose `generate` runs: the one inside, for models of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def put(model: Any, *methods: Any) -> None:
    """Have a model call these in place of its class's methods, with itself in front.

    Args:
        model: a module; copies of it call the same.
        methods: each with the `name` of the method that it is in place of.
    """
    for method in methods:
        setattr(model, method.name, types.MethodType(method, model))


def take_away(model: Any, *names: str) -> None:
    """Undo `put`, and what else is a model's own by these names.

    Methods that `forget` a model do, since copies of the model may share them.
    """
    own = getattr(model, "__dict__", {})
    for name in names:
        method = own.pop(name, None)
        if forget := getattr(getattr(method, "__func__", None), "forget", None):
            forget(model)
