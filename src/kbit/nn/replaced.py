"""What a quantized module keeps of the one that it replaced, where a constructor would not give it back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn


class Replaced(NamedTuple):
    """A module without its parameters."""

    kind: type[nn.Module]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Replaced:
        """All of a module but its parameters."""
        return cls(type(module), vars(module) | {"_parameters": dict.fromkeys(module._parameters)})

    def again(self) -> nn.Module:
        """The module, with None for each parameter; its constructor, which would draw them, does not run."""
        made = self.kind.__new__(self.kind)
        vars(made).update(self.attributes | {"_parameters": dict(self.attributes["_parameters"])})
        return made
