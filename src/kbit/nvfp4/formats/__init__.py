"""Formats of NVFP4: the two small floats, the byte layouts, and the tensor that carries them."""

from __future__ import annotations

from kbit.nvfp4.formats.layouts import LAYOUTS
from kbit.nvfp4.formats.tensor import NonFiniteError, NVFP4Tensor, check_nvfp4

__all__ = ["LAYOUTS", "NVFP4Tensor", "NonFiniteError", "check_nvfp4"]
