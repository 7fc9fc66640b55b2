"""Methods of a model that are its own, in place of its class's: how `generate` is had to do otherwise."""

from __future__ import annotations

import types
from typing import Any

from kbit.nn.unwrap import unwrapped


def generating(model: Any) -> Any:
    """The model whose `generate` runs: the one inside, for models of peft and what torch.compile returned."""
    model = unwrapped(model)
    return unwrapped(model.get_base_model()) if hasattr(model, "get_base_model") else model


def is_ours(value: Any) -> bool:
    """Whether an attribute of a model is one that kbit put there."""
    method = getattr(value, "__func__", value)
    return type(method).__module__.partition(".")[0] == __name__.partition(".")[0]


def put(model: Any, what: str, *methods: Any) -> None:
    """Have a model call these in place of its class's methods, with itself in front.

    Args:
        model: a module; copies of it call the same.
        what: for messages: the function that was called.
        methods: each with the `name` of the method that it is in place of.

    Raises:
        TypeError: the model has such a method of its own, which its class's would not know of.
    """
    for method in methods:
        own = vars(model).get(method.name)
        if own is not None and not is_ours(own):
            raise TypeError(
                f"{what}: this {type(model).__name__} has its own {method.name}, which would not be called. "
                f"Take it away, and put it in place of kbit's after {what}."
            )
    for method in methods:
        setattr(model, method.name, types.MethodType(method, model))


def take_away(model: Any, *names: str) -> None:
    """Undo `put`; a user's own methods stay.

    Methods that `forget` a model do, since copies of the model may share them.
    """
    own = getattr(model, "__dict__", {})
    for name in names:
        if is_ours(own.get(name)):
            method = own.pop(name)
            if forget := getattr(getattr(method, "__func__", None), "forget", None):
                forget(model)
