"""What recorded steps and prompts rest on in a model, beside what `recordings` knows of a call."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from kbit.integrations.transformers.config_parts import all_of
from kbit.integrations.transformers.left_padding import MoveRight
from kbit.nn.norm import FusedNorm
from kbit.nn.parts import QuantizedModule

_PLAIN = {torch.Tensor, torch.nn.Parameter}
_NUMBERS = {bool, int, float, str, type(None)}
_SETTLED = QuantizedModule, FusedNorm, torch.nn.Linear  # whose numbers nobody changes


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
        settings += [kind, id(own["forward"]) if "forward" in own else 0]
        if not issubclass(kind, _SETTLED):
            settings += [
                value for name, value in own.items() if value.__class__ in _NUMBERS and name[0] != "_"
            ]
        if module._forward_pre_hooks or module._forward_hooks:
            hooks += hooks_of(module)
        if hasattr(type(module), "merged_adapters"):
            used = tuple(module.active_adapters), tuple(module.merged_adapters)
            scaling = tuple(getattr(module, "scaling", {}).items())
            adapters.append((module.disable_adapters, *used, scaling))
    ways = tuple(config._attn_implementation for config in all_of(model.config))
    return ways, tuple(places), tuple(settings), tuple(hooks), tuple(adapters)


def hooks_of(module: torch.nn.Module) -> dict[int, Any]:
    """By numbers that no others of the process have; without another thread's, for its prompt."""
    hooks = {**module._forward_pre_hooks, **module._forward_hooks}
    return {number: hook for number, hook in hooks.items() if not isinstance(hook, MoveRight)}
