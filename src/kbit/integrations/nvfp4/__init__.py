"""NVFP4 in transformers: `NVFP4Config` quantizes a model while it is loaded, and round-trips it.

>>> config = NVFP4Config(activations="nvfp4", accum="exact")
>>> model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
>>> model.save_pretrained(target)

Importing this module imports transformers. Loading such a checkpoint needs `import kbit` only.
"""

from __future__ import annotations

from kbit.integrations.nvfp4.config import QUANT_METHOD, NVFP4Config
from kbit.integrations.nvfp4.quantizer import NVFP4HfQuantizer

__all__ = ["QUANT_METHOD", "NVFP4Config", "NVFP4HfQuantizer"]
