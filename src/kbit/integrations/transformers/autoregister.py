"""Make transformers know the method "kbit", and peft kbit's layers, whichever is imported first."""

from __future__ import annotations

from types import ModuleType

from kbit.integrations.on_import import when_imported
from kbit.integrations.peft import register as register_peft
from kbit.integrations.transformers import inplace

_REGISTRY = "transformers.quantizers.auto"
_LORA_CONFIG = "peft.tuners.lora.config"


def install() -> None:
    """Register now, or as soon as those libraries are imported. Calling it again changes nothing."""
    inplace.install()
    when_imported(_REGISTRY, register, complete="register_quantizer")
    when_imported(_LORA_CONFIG, register_peft, complete="LoraConfig")


def register(registry: ModuleType) -> None:
    """Add kbit to transformers' tables of quantization methods.

    Args:
        registry: the module transformers.quantizers.auto.
    """
    from kbit.format.policy import QUANT_METHOD
    from kbit.integrations.transformers.config import KbitConfig
    from kbit.integrations.transformers.quantizer import KbitHfQuantizer

    if QUANT_METHOD not in registry.AUTO_QUANTIZATION_CONFIG_MAPPING:
        registry.register_quantization_config(QUANT_METHOD)(KbitConfig)
    if QUANT_METHOD not in registry.AUTO_QUANTIZER_MAPPING:
        registry.register_quantizer(QUANT_METHOD)(KbitHfQuantizer)
