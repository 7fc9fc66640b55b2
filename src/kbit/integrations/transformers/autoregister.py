"""Make transformers know "kbit" and "kbit_nvfp4", peft kbit's layers, and PyTorch's FLOP counter kbit's ops.

In any order of imports.
"""

from __future__ import annotations

from types import ModuleType

from kbit.integrations import flops
from kbit.integrations.on_import import when_imported
from kbit.integrations.peft import guard_loading as guard_adapters
from kbit.integrations.peft import guard_merging, guard_models
from kbit.integrations.peft import register as register_peft
from kbit.integrations.transformers import inplace
from kbit.integrations.transformers.counting import guard_counting
from kbit.integrations.transformers.drafts import guard_drafts
from kbit.integrations.transformers.key_mapping import guard_loading
from kbit.integrations.transformers.resizing import guard_resizing
from kbit.integrations.transformers.sections import guard_configs, guard_weights
from kbit.integrations.transformers.tying import guard_tying

_REGISTRY = "transformers.quantizers.auto"
_CONFIGS = "transformers.configuration_utils"
_MODELS = "transformers.modeling_utils"
_DRAFTS = "transformers.generation.candidate_generator"
_LORA_CONFIG = "peft.tuners.lora.config"
_PEFT_MODELS = "peft.peft_model"
_TUNERS = "peft.tuners.tuners_utils"
_FLOPS = "torch.utils.flop_counter"


def install() -> None:
    """Register now, or as soon as those libraries are imported. Calling it again changes nothing."""
    inplace.install()
    when_imported(_REGISTRY, register, complete="register_quantizer")
    when_imported(_CONFIGS, guard_configs, complete="PreTrainedConfig")
    when_imported(_MODELS, _guard_models, complete="PreTrainedModel")
    when_imported(_DRAFTS, guard_drafts, complete="_PruneReindexingLMHead")
    when_imported(_LORA_CONFIG, register_peft, complete="LoraConfig")
    when_imported(_PEFT_MODELS, guard_models, complete="PeftModel")
    when_imported(_TUNERS, guard_merging, complete="BaseTuner")
    when_imported(_FLOPS, flops.register, complete="FlopCounterMode")


def _guard_models(module: ModuleType) -> None:
    guard_adapters(module)
    guard_counting(module)
    guard_loading(module)
    guard_resizing(module)
    guard_tying(module)
    guard_weights(module)
    inplace.guard_saving(module)


def register(registry: ModuleType) -> None:
    """Add kbit's to transformers' tables of quantization methods.

    Args:
        registry: the module transformers.quantizers.auto.
    """
    # Quantizers add themselves: if one is the first to need transformers' registry, this runs during
    # its import, and it has no class yet.
    import kbit.integrations.nvfp4.quantizer
    import kbit.integrations.transformers.quantizer  # noqa: F401
    from kbit.integrations.nvfp4.config import NVFP4Config
    from kbit.integrations.transformers.config import KbitConfig

    for config in (KbitConfig, NVFP4Config):
        if config.quant_method not in registry.AUTO_QUANTIZATION_CONFIG_MAPPING:
            registry.register_quantization_config(config.quant_method)(config)
