"""Layers with NVFP4 weights, and activations in NVFP4 (W4A4) or 16 bits (W4A16)."""

from __future__ import annotations

from kbit.nvfp4.layers.experts import NVFP4Experts
from kbit.nvfp4.layers.linear import NVFP4Linear
from kbit.nvfp4.layers.parts import NVFP4Module, NVFP4Settings
from kbit.nvfp4.layers.replace import replace_layers, replaceable

__all__ = [
    "NVFP4Experts",
    "NVFP4Linear",
    "NVFP4Module",
    "NVFP4Settings",
    "replace_layers",
    "replaceable",
]
