"""Modules of a model that get another `forward`, and stay what they are.

Such a module's class becomes the base of one made here, so that whatever looks for the module, its class, its
weights or its hooks still finds them; copies and pickles keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn


class MixedIn(nn.Module):
    """What classes are mixed with. A subclass has the `forward`, and calls that of `super()` as it needs.

    Attributes:
        own: the class that a module had.
        prefix: of the name of the class that it gets.
        passing: attributes of modules that one call leaves for another, which copies and pickles are without.
    """

    own: type[nn.Module]
    prefix = "Kbit"
    passing: ClassVar[tuple[str, ...]] = ()

    def leave(self) -> None:
        """Take away what the class itself lacks, before a module gets that again."""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = {name: value for name, value in vars(self).items() if name not in self.passing}
        return _again, (self.own, *type(self).__bases__[:1]), state


class Joining(MixedIn):
    """Of modules whose layers' tiles are to be neighbours in memory, wherever they come to be."""

    def join(self) -> None:
        """Have them be, if they can."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.join()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.join()


_classes: dict[tuple[Any, Any], type[MixedIn]] = {}


def mixed(own: type[nn.Module], kind: type[MixedIn]) -> type[MixedIn]:
    """A class mixed with a kind; one for each pair."""
    if (own, kind) not in _classes:
        name = f"{kind.prefix}{own.__name__}"
        _classes[own, kind] = type(name, (kind, own), {"__module__": __name__, "own": own})
    return _classes[own, kind]


def _again(own: type[nn.Module], kind: type[MixedIn]) -> nn.Module:
    """A module without anything, for pickle and copies."""
    made = mixed(own, kind)
    return made.__new__(made)


def stand_in(module: nn.Module) -> Any:
    """A module of the same class with the same attributes, to try on other parts what the class computes."""
    made = type(module).__new__(type(module))
    vars(made).update(vars(module))
    return made


def attributes(module: nn.Module) -> tuple[tuple[str, Any], ...]:
    """What a module may compute by beside its tensors, such as a number of groups; comparable."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    return tuple(
        (name, value if isinstance(value, bool | int | float | str | None) else id(value))
        for name, value in sorted(own.items())
    )


def mix_in(module: nn.Module, kind: type[MixedIn]) -> None:
    """Give a module what a kind has."""
    module.__class__ = mixed(type(module), kind)


def take_out(model: nn.Module) -> None:
    """Give all modules of a model the classes that they had."""
    for module in model.modules():
        if isinstance(module, MixedIn):
            module.leave()
            own, mixed_forward = module.own, type(module).forward
            module.__class__ = own  # type: ignore[assignment]
            for name in ("forward", "_old_forward"):  # of the module itself: accelerate's hooks keep it there
                if getattr(vars(module).get(name), "__func__", None) is mixed_forward:
                    vars(module)[name] = MethodType(own.forward, module)
