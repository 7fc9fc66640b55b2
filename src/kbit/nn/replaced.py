"""What a quantized module keeps of the one that it replaced, where a constructor would not give it back."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

_OF_HOOKS = ("_hf_hook", "_old_forward", "forward")


class Replaced(NamedTuple):
    """A module without its parameters."""

    kind: type[nn.Module]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> Replaced:
        """All of a module but its parameters, and accelerate's hook, which is bound to the module itself."""
        kept = {key: value for key, value in vars(module).items() if key not in _OF_HOOKS}
        return cls(type(module), kept | {"_parameters": dict.fromkeys(module._parameters)})

    def again(self) -> nn.Module:
        """The module, with None for each parameter; its constructor, which would draw them, does not run."""
        made = self.kind.__new__(self.kind)
        vars(made).update(self.attributes | {"_parameters": dict(self.attributes["_parameters"])})
        return made
