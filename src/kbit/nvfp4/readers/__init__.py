"""Readers of NVFP4 checkpoints: ModelOpt and compressed-tensors (safetensors), and GGUF."""

from __future__ import annotations

from kbit.nvfp4.readers.gguf import from_gguf
from kbit.nvfp4.readers.safetensors import from_compressed_tensors, from_modelopt

__all__ = ["from_compressed_tensors", "from_gguf", "from_modelopt"]
