"""Models of transformers that `kbit.quantize_model` changed: what `save_pretrained` needs to know of it."""

from __future__ import annotations

import sys

from torch import nn

from kbit.format.policy import QuantizationPolicy
from kbit.nn import replace


def install() -> None:
    """Have `quantize_model` tell transformers. Calling it again changes nothing."""
    if tell_transformers not in replace.after_quantizing:
        replace.after_quantizing.append(tell_transformers)


def tell_transformers(model: nn.Module, policy: QuantizationPolicy) -> None:
    """Give a model of transformers the config and conversions with which it saves as a kbit checkpoint.

    Other models are left alone, and transformers is not imported for them: without it there are none of its
    models.
    """
    if "transformers.modeling_utils" not in sys.modules:
        return
    from transformers import PreTrainedModel

    from kbit.integrations.transformers import placement, saving
    from kbit.integrations.transformers.config import KbitConfig
    from kbit.integrations.transformers.quantizer import KbitHfQuantizer

    if not isinstance(model, PreTrainedModel):
        return
    config = policy if isinstance(policy, KbitConfig) else KbitConfig.from_dict(policy.to_dict())
    placement.rename_tied_parts(model)
    model.hf_quantizer = KbitHfQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, config.quant_method
    model.config.quantization_config = config
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = saving.own_conversions(model)
    model._weight_conversions = saving.with_experts(model, conversions)
