"""Putting trained adapters into quantized weights."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from peft import PeftMixedModel
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from kbit.format import type_checks
from kbit.format.autocast import without_autocast
from kbit.format.policy import QuantizationPolicy
from kbit.format.words import counted
from kbit.integrations.peft.layers import LoraEmbedding, LoraKbitExperts, LoraLinear, LoraOnCodes
from kbit.integrations.transformers.inplace import forget_if_plain, fused_in_files, is_of_transformers
from kbit.nn import KbitExperts, KbitLinear
from kbit.nn.fuse import parts_of, quantize_fused
from kbit.nn.fused_experts import WEIGHTS
from kbit.nn.parts import QuantizedModule
from kbit.ops import api

# Kinds of LoRA that peft itself merges into no weight, since they differ from token to token or from group to
# group of inputs.
_NEVER_MERGED = {"ALoraLinearVariant", "ArrowLinearVariant", "QALoraLinearVariant"}


@torch.inference_mode(False)  # the merged model may be trained later
@torch.no_grad()
def merge(model: Any, requantize: bool = True) -> Any:
    """Add the active adapters of a peft model to its weights, and return the model without adapters.

    Every adapted weight is decoded to float32, the adapter added, and the sum rounded: to codes again by
    default, or to the adapter-free layer's 16-bit counterpart. Codes are coarse next to a trained update, so
    measure a requantized model; 16-bit layers lose nothing but take four times the memory.

    Layers that inactive adapters alone adapt become what they were before.

    Args:
        model: a peft model on kbit layers.
        requantize: quantize the sums, at each layer's own width and codebook. False makes linear layers
            16-bit ones, of the model's dtype, and leaves them out of the model's quantization config, so that
            it saves and reloads.

    Returns:
        The base model, changed in place.

    Raises:
        TypeError: the model is none of peft's, or mixes tuners (`mixed=True`); `requantize` is no bool.
        ValueError: experts are adapted and `requantize` is off (there is no 16-bit class to fall back to); an
            embedding is adapted; an adapter has a bias and its layer none, holds NaN or Inf, or is of a kind
            that differs from token to token (aLoRA, Arrow); or a quantized layer's adapter is not LoRA, or
            puts tokens in front of prompts. Nothing has changed then.
        NonFiniteWeightError: a sum overflows; layers in front of the one it names are merged already.
    """
    type_checks.flag("merge", "requantize", requantize)
    base = _base_of(model)
    with ExitStack() as without:  # which would add adapters up in 16 bits
        for kind in {parameter.device.type for parameter in base.parameters()}:
            without.enter_context(without_autocast(torch.device(kind)))
        plain = _merge(model, base, requantize)
    if is_of_transformers(plain):
        forget_if_plain(plain)
    return plain


def _merge(model: Any, base: Any, requantize: bool) -> Any:
    adapted = [(name, layer) for name, layer in base.named_modules() if isinstance(layer, LoraLayer)]
    for name, layer in adapted:  # before anything changes
        _check(name, layer, requantize)
    merged = {name: layer for name, layer in adapted if _active(layer)}
    fused = fused_in_files(base, [name for name, one in merged.items() if isinstance(one, LoraKbitExperts)])
    for name, layer in adapted:
        if isinstance(layer, LoraOnCodes) and name not in merged:
            base.set_submodule(name, layer.get_base_layer())
        elif isinstance(layer, LoraKbitExperts):
            base.set_submodule(name, _experts(layer, apart=name not in fused))
        elif isinstance(layer, LoraLinear):
            base.set_submodule(name, _linear(layer, None if requantize else _dtype_of(base, layer)))
            if not requantize:
                _leave_out(base, name)
    return model.merge_and_unload()  # what is not of kbit, peft merges itself


def _base_of(model: Any) -> Any:
    """The model in a model of peft whose adapters are LoRA's."""
    if hasattr(model, "named_modules"):
        check_tuners(model)
    if isinstance(model, PeftMixedModel):
        raise TypeError(
            "merge: PeftMixedModel may hold adapters of several kinds, and those of LoRA alone merge into "
            "quantized weights. Load them by get_peft_model or PeftModel without mixed=True."
        )
    if not hasattr(model, "get_base_model"):
        raise TypeError(
            f"merge: {type(model).__name__} is no peft model, so it has no adapters to merge. Give what "
            f"peft.get_peft_model returned."
        )
    config = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise ValueError(
            f"merge: {type(config).__name__} puts tokens in front of a prompt, which no weight "
            f"can do. Keep the adapter beside the model."
        )
    return model.get_base_model()


def check_tuners(model: nn.Module) -> None:
    """Refuse a model in which a quantized layer has an adapter other than kbit's own LoRA.

    Raises:
        ValueError: there is one; the message names the first.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer) or isinstance(layer, LoraOnCodes):
            continue
        if isinstance(layer.get_base_layer(), QuantizedModule):
            tuner = f"{type(layer).__module__}.{type(layer).__name__}"
            raise ValueError(
                f"{name}: {tuner} adapts a quantized layer, and merging would write into its codes. Keep the "
                f"adapter beside the model, or merge it into the unquantized model and quantize that."
            )


def refuse_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters to `quantize_model`, which would quantize these, too.

    Raises:
        ValueError: there is one; the message names the first.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            raise ValueError(
                f"quantize_model: {name} has an adapter, which would be quantized, too. Merge it or take it "
                f"off first (merge_and_unload, unload), or quantize the model and then add it."
            )


def _active(layer: LoraLayer) -> list[str]:
    """The active ones of a layer's adapters; others may be active elsewhere."""
    return [one for one in layer.active_adapters if one in layer.lora_A or one in layer.lora_embedding_A]


def _check(name: str, layer: Any, requantize: bool) -> None:
    active = _active(layer)
    _refuse_variants(name, layer, active)
    if not active or not isinstance(layer, LoraOnCodes):
        return
    if isinstance(layer, LoraEmbedding):
        raise ValueError(
            f"{name}: the adapter of a quantized embedding cannot be merged. Keep it beside the model."
        )
    biased = isinstance(layer, LoraLinear) and any(layer.lora_bias.get(one) for one in active)
    if biased and layer.get_base_layer().bias is None:
        raise ValueError(
            f"{name}: the adapter has a bias and the layer none, so a checkpoint has no place for it. Keep "
            f"the adapter beside the model, or train with lora_bias=False."
        )
    if isinstance(layer, LoraKbitExperts) and not requantize:
        raise ValueError(
            f"{name}: fused experts cannot be left in 16 bits. Use requantize=True, or keep the adapter "
            f"beside the model."
        )
    _refuse_nonfinite(name, layer, active)


def _refuse_variants(name: str, layer: Any, active: list[str]) -> None:
    """Refuse adapters that are no sum with a weight; those of DoRA on 16-bit layers peft merges."""
    for adapter in active:
        variant = layer.lora_variant.get(adapter)
        if variant is None:
            continue
        kind = type(variant).__name__
        if isinstance(layer, LoraOnCodes) or kind in _NEVER_MERGED:
            raise ValueError(
                f"{name}: adapter {adapter!r} is of the kind {kind}, whose effect no weight can have. Keep "
                f"it beside the model."
            )


def _refuse_nonfinite(name: str, layer: Any, active: list[str]) -> None:
    for adapter in active:
        held = [*layer.lora_A[adapter].parameters(), *layer.lora_B[adapter].parameters()]
        count = sum(one.numel() - int(torch.isfinite(one).sum()) for one in held)
        if count:
            what = counted(count, "NaN or Inf value")
            raise ValueError(
                f"{name}: adapter {adapter!r} holds {what}, and so would its sum with the weight. Take an "
                f"earlier checkpoint of the adapter, or train it again."
            )


def _settings(layer: QuantizedModule) -> tuple[int, torch.Tensor, str, bool]:
    return layer.bits, layer.codebook, layer.absmax_format, True


def _dtype_of(model: Any, lora: LoraLinear) -> torch.dtype:
    """The dtype of a model of transformers; of others that of the layer's bias, or a new layer's."""
    stated = getattr(model, "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    bias: torch.Tensor | None = lora.get_base_layer().bias
    return torch.get_default_dtype() if bias is None else bias.dtype


def _linear(lora: LoraLinear, dtype: torch.dtype | None) -> nn.Linear:
    """The merged layer, quantized again or, where there is a dtype, not."""
    base: KbitLinear = lora.get_base_layer()
    weight, bias = base.dequantize(), base.bias
    for adapter in _active(lora):
        weight += lora.get_delta_weight(adapter).to(weight)
        if lora.lora_bias[adapter]:
            assert bias is not None
            trained = lora.lora_B[adapter].bias * lora.scaling[adapter]
            bias = nn.Parameter((bias + trained).to(bias.dtype), requires_grad=False)
    base.bias = bias
    if dtype is not None:
        plain = nn.Linear(base.in_features, base.out_features, bias=False, device="meta")
        plain.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        plain.register_parameter("bias", bias)
        return plain
    where = f"{base.layer_name}.weight"
    base.fill("weight", parts_of(api.quantize(weight, *_settings(base), where=where)))
    return base


def _experts(lora: Any, apart: bool) -> KbitExperts:
    """`apart`: as in `KbitExperts.from_experts`."""
    base: KbitExperts = lora.get_base_layer()
    for name, count in WEIGHTS.items():
        weight = base.dequantize(name)
        for adapter in _active(lora):
            weight += lora.get_delta_weight(adapter, name)
        where = f"{base.layer_name}.{name}"
        base.fill(name, quantize_fused(weight, count if apart else 1, *_settings(base), where=where))
    return base


def _leave_out(model: Any, name: str) -> None:
    """Have the model's quantization config, which is saved with it, say that a module is not quantized."""
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if isinstance(config, QuantizationPolicy):
        config.modules_to_not_convert = [*(config.modules_to_not_convert or []), name]
