"""NVFP4 in transformers: `NVFP4Config` quantizes a model while it is loaded, and round-trips it.

>>> config = NVFP4Config(activations="nvfp4", accum="exact")
>>> model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
>>> model.save_pretrained(target)

Import this module before loading such a checkpoint: importing it makes the method known to transformers,
which it imports.
"""

from __future__ import annotations

from kbit.integrations.nvfp4.config import QUANT_METHOD, NVFP4Config
from kbit.integrations.nvfp4.quantizer import NVFP4HfQuantizer

__all__ = ["QUANT_METHOD", "NVFP4Config", "NVFP4HfQuantizer"]


def _register() -> None:
    from transformers.quantizers import auto

    if QUANT_METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(QUANT_METHOD)(NVFP4Config)
    if QUANT_METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(QUANT_METHOD)(NVFP4HfQuantizer)


_register()
