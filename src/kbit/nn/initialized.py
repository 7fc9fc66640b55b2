"""What transformers asks of a layer before it draws numbers for what files lack."""

from __future__ import annotations

import torch
from torch import nn

from kbit.format.names import original_of


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

    def _stand_in(self) -> torch.Tensor | None:
        """What is the weight for those who draw numbers while a model is loaded; None at other times."""
        return self.__dict__.get("weight")
