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
            TypeError: the name is `weight`.
        """
        if name == "weight" and param is not None:
            raise TypeError(
                f"{type(self).__name__}: weight cannot be replaced, the layer holds codes"
                f"{at(getattr(self, 'layer_name', ''))}. Put a layer in its place: one that from_linear "
                f"makes of the new weight, or the one whose weight it is to share."
            )
        super().register_parameter(name, param)

    def _stand_in(self) -> torch.Tensor | None:
        """What is the weight for those who draw numbers while a model is loaded; None at other times."""
        return self.__dict__.get("weight")
