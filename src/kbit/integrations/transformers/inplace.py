"""quantize_model for models of transformers: what `save_pretrained` needs to know afterwards."""

from __future__ import annotations

import sys

from torch import nn

from kbit.format.policy import QuantizationPolicy
from kbit.nn import replace
from kbit.nn.replace import Progress


def quantize_model(
    model: nn.Module, policy: QuantizationPolicy, progress: Progress | None = None
) -> nn.Module:
    """Quantize any model in place; one of transformers can be saved and reloaded afterwards.

    Args, returns, raises: see `kbit.nn.replace.quantize_model`.

    >>> kbit.quantize_model(model, kbit.KbitConfig(bits=4)).save_pretrained(folder)
    """
    replace.quantize_model(model, policy, progress)
    # A model of transformers cannot exist before transformers is imported.
    if "transformers" in sys.modules:
        _tell_transformers(model, policy)
    return model


def _tell_transformers(model: nn.Module, policy: QuantizationPolicy) -> None:
    from transformers import PreTrainedModel

    from kbit.integrations.transformers import placement, saving
    from kbit.integrations.transformers.config import KbitConfig
    from kbit.integrations.transformers.quantizer import KbitHfQuantizer

    if not isinstance(model, PreTrainedModel):
        return
    config = policy if isinstance(policy, KbitConfig) else KbitConfig.from_dict(policy.to_dict())
    quantizer = KbitHfQuantizer(config, pre_quantized=True)
    placement.rename_tied_parts(model)
    model.hf_quantizer = quantizer
    model.is_quantized, model.quantization_method = True, config.quant_method
    model.config.quantization_config = config
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = saving.own_conversions(model)
    model._weight_conversions = saving.with_experts(model, conversions)
