"""Layers whose weight is decoded, to transformers, which draws what files lack, and to who sets a weight."""

from __future__ import annotations

import torch
from torch import nn

from kbit.format.names import original_of
from kbit.format.words import at


class Initialized(nn.Module):
    """A layer of which a loader draws only what files may lack, such as a bias."""

    @property
    def _is_hf_initialized(self) -> bool:
        """Whether nothing here is to be drawn: transformers asks, and sets it.

        Of a model with code of its own it asks buffers, too, and marks none that is not saved: such code
        would overwrite biases that were loaded.
        """
        known = (
            getattr(parameter, "_is_hf_initialized", False)
            for name, parameter in self._parameters.items()
            if parameter is not None and original_of(name) == name
        )
        return self.__dict__.get("_is_hf_initialized", False) or all(known)

    @_is_hf_initialized.setter
    def _is_hf_initialized(self, value: bool) -> None:
        self.__dict__["_is_hf_initialized"] = value

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; `weight` is none, but decoded at each reading.

        Raises:
            TypeError: the name is `weight`, and it has no place; see `allow_spare`.
        """
        if name == "weight" and param is not None:
            if not self._may_be_spare():
                raise TypeError(
                    f"{type(self).__name__}: weight cannot be replaced, the layer holds codes"
                    f"{at(getattr(self, 'layer_name', ''))}. Put a layer in its place: one that from_linear "
                    f"makes of the new weight, or the one whose weight it is to share."
                )
            param._is_hf_initialized = True  # type: ignore[attr-defined]
        super().register_parameter(name, param)

    def allow_spare(self) -> None:
        """Let a loader replace the placeholder of `weight`, until `drop_spare`.

        Of weights that are tied files may hold one name: to the other, which a loader knows, too, it gives
        what is never read.
        """
        self._parameters["weight"]._is_hf_initialized = True  # type: ignore[union-attr]
        self.__dict__["_spare"] = True

    def drop_spare(self) -> bool:
        """Undo `allow_spare`; whether there still was a placeholder, since no weight was loaded."""
        allowed: bool = self.__dict__.pop("_spare", False)
        return allowed and self._parameters.pop("weight", None) is not None

    def give_back(self, module: nn.Module) -> set[str]:
        """Give the module that this layer replaced what was loaded beside its weights, such as a bias.

        Returns:
            The names of parameters that only this layer has.

        Raises:
            ValueError: some weights were loaded, or parts are split over ranks by now (DTensors).
        """
        own, parts = module._parameters, self._parameters.keys() - module._parameters
        weights = {original_of(part) for part in parts} & own.keys()
        split = any(type(held) not in (nn.Parameter, type(None)) for held in self._parameters.values())
        if split or any(self._parameters.get(name) is not own[name] for name in weights):
            path, lacking = getattr(self, "layer_name", ""), min(weights & self._parameters.keys())
            raise ValueError(
                f"the weights hold no tensor {path}.{lacking}. Leave the layer unquantized, with "
                f"modules_to_not_convert=[{path!r}], to have it drawn at random."
            )
        own.update((name, self._parameters[name]) for name in own.keys() & self._parameters)
        return parts

    def _may_be_spare(self) -> bool:
        return "_spare" in self.__dict__ and "weight" in self._parameters

    def _stand_in(self) -> torch.Tensor | None:
        """What is the weight for those who draw numbers while a model is loaded; None at other times."""
        weight: torch.Tensor | None = self.__dict__.get("weight")
        return self._parameters.get("weight") if weight is None and "_spare" in self.__dict__ else weight
