"""What recorded steps and prompts rest on in a model, beside what `recordings` knows of a call."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as every_module

from kbit.format.versions import version_of
from kbit.integrations.transformers.config_parts import all_of
from kbit.integrations.transformers.left_padding import MoveRight
from kbit.nn.parts import QuantizedModule
from kbit.nn.tiling import TileableModule

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_NUMBERS = {bool, int, float, str, type(None)}
_SETTLED = QuantizedModule, torch.nn.Linear  # whose numbers nobody changes
# Libraries whose hooks compute on the GPU alone, and of padded prompts what they do of others.
_HAVE_HOOKS = {"accelerate", "kbit", "peft", "torch", "transformers"}


class _HandedOn(threading.local):
    """What this thread has just found out for the steps that follow, and of which model."""

    model: Any = None
    found: Hashable = None


_handed_on = _HandedOn()


def hand_on(model: Any, found: Hashable) -> None:
    """Have the steps that follow in this thread take a model's `preconditions` from here."""
    _handed_on.model, _handed_on.found = model, found


def handed_on(model: Any) -> Hashable:
    """A model's `preconditions`: what was handed on, once, or else found now."""
    whose, found = _handed_on.model, _handed_on.found
    hand_on(None, None)
    return found if whose is model else preconditions(model)


def preconditions(model: Any) -> Hashable:
    """Where weights lie, how attention is computed, which hooks there are, and which adapters of peft.

    And modules' classes, forwards of their own, and numbers, such as how many experts a token takes. It is
    asked in front of every prompt, so it may not take long.
    """
    places, settings, adapters = [], [], []
    hooks: list[int] = []
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                plain = tensor.__class__ in _PLAIN or not hasattr(tensor, "to_local")
                local = tensor if plain else tensor.to_local()
                places.append((local.data_ptr(), local.dtype))
        own, kind = vars(module), module.__class__
        settings += [kind, _itself(own["forward"]) if "forward" in own else None]
        if not issubclass(kind, _SETTLED):
            settings += [
                value for name, value in own.items() if value.__class__ in _NUMBERS and name[0] != "_"
            ]
        if issubclass(kind, TileableModule):
            settings.append(module.launched_values())
        if module._forward_pre_hooks or module._forward_hooks:
            hooks += hooks_of(module)
        if hasattr(type(module), "merged_adapters"):
            used = tuple(module.active_adapters), tuple(module.merged_adapters)
            scaling = tuple(getattr(module, "scaling", {}).items())
            adapters.append((module.disable_adapters, *used, scaling))
    hooks += _everywhere()
    ways = tuple(config._attn_implementation for config in all_of(model.config))
    return ways, tuple(places), tuple(settings), tuple(hooks), tuple(adapters)


def changes(model: Any) -> int:
    """How often a model's weights and buffers were changed in place; see `version_of`."""
    total = 0
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                total += version_of(tensor)
    return total


def hooks_of(module: torch.nn.Module) -> dict[int, Any]:
    """By numbers that no others of the process have; without another thread's, for its prompt."""
    hooks = {**module._forward_pre_hooks, **module._forward_hooks}
    return {number: hook for number, hook in hooks.items() if not isinstance(hook, MoveRight)}


def _everywhere() -> dict[int, Any]:
    """Hooks on calls of every module there is."""
    return {**every_module._global_forward_pre_hooks, **every_module._global_forward_hooks}


def _itself(forward: Any) -> Hashable:
    """What is unlike that of any other function, also of one that comes to lie where it lay."""
    function = getattr(forward, "__func__", forward)
    try:
        return weakref.ref(function), id(getattr(forward, "__self__", None))
    except TypeError:  # of C
        return function, None


def strangers(model: Any) -> Iterator[tuple[str, str]]:
    """(Name of a module, or "", and what is called there): hooks and own forwards, unless of known libraries.

    Peft's activated LoRA, whose hooks come and go with each call, counts from a prompt's end.
    """
    for name, module in model.named_modules():
        own = vars(module).get("forward")
        for variant in getattr(module, "lora_variant", {}).values():
            if "ALora" in type(variant).__name__ or "ALora" in getattr(variant, "__name__", ""):
                yield name, "activated LoRA"
        for what in (*hooks_of(module).values(), *([] if own is None else [own])):
            if (whose := _where(what)).partition(".")[0] not in _HAVE_HOOKS:
                yield name, whose
    for hook in _everywhere().values():
        yield "", _where(hook)


def stranger_in(model: Any) -> str | None:
    """The beginning of a sentence that names the first of a model's `strangers`; None if there is none."""
    for name, whose in strangers(model):
        return f"{name or 'The model'} of {type(model).__name__} has a hook or its own forward, {whose}."
    return None


def _where(hook: Any) -> str:
    """Module and name of a hook."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
