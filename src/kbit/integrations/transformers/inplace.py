"""Models of transformers that are quantized or dequantized in place: their names, and what saving needs."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from kbit.format.policy import QUANT_METHOD, QuantizationPolicy
from kbit.integrations.devices import is_distributed
from kbit.integrations.on_import import wrap_method
from kbit.integrations.transformers.config_parts import all_of
from kbit.nn import KbitExperts, dequantize, refusals, replace
from kbit.nn.parts import QuantizedModule


def install() -> None:
    """Have `quantize_model` and `dequantize_model` tell transformers. Calling it again changes nothing."""
    if tell_transformers not in replace.after_quantizing:
        replace.before_quantizing += [refuse_other_methods, _refuse_split]
        replace.after_quantizing.append(tell_transformers)
        dequantize.after_dequantizing.append(forget)
        replace.other_names.append(names_in_files)
        replace.fused_experts.append(fused_in_files)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether transformers has this class of model; it is not imported to find out."""
    if "transformers.modeling_utils" not in sys.modules:
        return False  # without it there are none of its models
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def names_in_files(model: nn.Module) -> Mapping[str, list[str]]:
    """{module: its names in the model's files} where they are others; see `names.names_in_files`."""
    if not is_of_transformers(model):
        return {}
    from kbit.integrations.transformers import names

    return names.names_in_files(model)


def fused_in_files(model: nn.Module, experts: Iterable[str] | None = None) -> set[str]:
    """Names of fused experts that the model's files hold fused, too; see `names.fused_in_files`."""
    if not is_of_transformers(model):
        return set()
    from kbit.integrations.transformers import names

    return names.fused_in_files(model, experts)


def refuse_other_methods(model: nn.Module) -> None:
    """Refuse a model of transformers whose config says another method: a folder can state only one.

    Raises:
        ValueError: it does.
    """
    # A config of which no model was loaded says nothing of this one.
    if not is_of_transformers(model) or getattr(model, "hf_quantizer", None) is None:
        return
    section = getattr(model.config, "quantization_config", None)
    if section is None or isinstance(section, QuantizationPolicy):
        return
    raise ValueError(
        f"quantize_model: the model is quantized already, by {type(section).__name__}, and its config can "
        f"state one method only. Quantize the unquantized model."
    )


def is_planned_over_ranks(model: nn.Module) -> bool:
    """Whether a tensor or expert parallel plan spreads a model of transformers over ranks, or will do so."""
    config = getattr(model.config, "distributed_config", None)
    asked = [getattr(config, name, None) for name in ("tp_plan", "enable_expert_parallel")]
    ranks = [getattr(config, name, None) or 1 for name in ("tp_size", "ep_size")]
    return any(asked) or max(ranks) > 1 or getattr(model, "_tp_size", None) is not None


def _refuse_split(model: nn.Module) -> None:
    if is_of_transformers(model) and is_planned_over_ranks(model):
        raise ValueError(
            "quantize_model: the model is split over ranks, each of which has a part of its weights. "
            "Quantize it on loading: from_pretrained(..., tp_plan=..., quantization_config=KbitConfig(...))."
        )


def tell_transformers(model: nn.Module, policy: QuantizationPolicy) -> None:
    """Give a model of transformers the config and conversions with which it saves as a kbit checkpoint.

    Other models are only marked: they may become parts of such a model.
    """
    _mark_as_initialized(model)
    if refusals.has_quantized(model):
        _mark_configs(model, quantized=True)
    if not is_of_transformers(model):
        return
    _tell(model, policy)


def guard_saving(module: ModuleType) -> None:
    """Have models save as what they are by then, whoever set layers or took some away, or shares a config.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "save_pretrained", _told)


_FUSED = (
    "are quantized experts, which files hold in the original format. Leave out save_original_format=False."
)
_NOT_FOUND = (
    "is quantized, and from_pretrained finds no codes in a distributed checkpoint. Leave out "
    "distributed_checkpoint=True: called on every rank, save_pretrained gathers the parts of all."
)


def _told(original: Any) -> Any:
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = inspect.signature(original).bind(self, *args, **kwargs).arguments
        if options.get("save_original_format") is False:
            _refuse_with(KbitExperts, self, _FUSED)
        if options.get("distributed_checkpoint"):
            _refuse_with(QuantizedModule, self, _NOT_FOUND)
        quantizer, quantized = getattr(self, "hf_quantizer", None), refusals.has_quantized(self)
        if quantized and not _saves_adapters(self):
            _refuse_wrapped_layers(self)
        if quantizer is None and quantized:
            _tell(self, QuantizationPolicy())
        elif quantizer is not None and not forget_if_plain(self) and not _saves_adapters(self):
            _restate(self, quantizer)
        with _untied(self) if quantized else _plain_config(self.config):
            return original(self, *args, **kwargs)

    return save_pretrained


def _saves_adapters(model: Any) -> bool:
    """Whether a model has adapters of peft in it, by whose names layers go; only they are saved."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def _restate(model: Any, quantizer: Any) -> None:
    """Have the config of a quantized model say what its layers are; models may share a config."""
    from kbit.integrations.transformers.names import stated_policy
    from kbit.integrations.transformers.quantizer import as_config
    from kbit.integrations.transformers.saving import refuse_other_levels

    policy = quantizer.quantization_config
    if not isinstance(policy, QuantizationPolicy):  # of another method
        return
    layers = [module for module in model.modules() if isinstance(module, QuantizedModule)]
    codebooks = {(layer.bits, *layer.levels) for layer in layers}
    if len(codebooks) > len({layer.bits for layer in layers}) or len({x.absmax_format for x in layers}) > 1:
        refuse_other_levels(model, policy)
    if not is_distributed():
        quantizer.quantization_config = as_config(stated_policy(model, policy))
    model.config.quantization_config = quantizer.quantization_config


@contextlib.contextmanager
def _untied(model: Any) -> Iterator[None]:
    """With a config that ties nothing, where it ties what is two weights by now, not quantized alike.

    Loading would take the quantized one for both.
    """
    from kbit.integrations.transformers.names import alike, broken_ties

    # Of weights that differed when they were loaded transformers forgot the tie, but the config has it.
    ends: list[Any] = []
    with contextlib.suppress(AttributeError, NotImplementedError):  # models without words
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    broken = broken_ties(model) or (ends and None not in ends and not alike(*ends))
    configs = [each for each in all_of(model.config) if getattr(each, "tie_word_embeddings", False)]
    configs = configs if broken else []
    for each in configs:
        each.tie_word_embeddings = False
    try:
        yield
    finally:
        for each in configs:
            each.tie_word_embeddings = True


@contextlib.contextmanager
def _plain_config(config: Any) -> Iterator[None]:
    """Without what quantized models say that share the config, or one of a part's."""
    found = [(each, getattr(each, "quantization_config", None)) for each in all_of(config)]
    sections = [(each, section) for each, section in found if _is_ours(section)]
    for each, _ in sections:
        del each.quantization_config
    try:
        yield
    finally:
        for each, section in sections:
            each.quantization_config = section


def _is_ours(section: object) -> bool:
    """Whether a config section says kbit: an object, or in any format, as AutoConfig reads it from files."""
    if isinstance(section, Mapping):
        return str(section.get("quant_method")).startswith(QUANT_METHOD)
    return isinstance(section, QuantizationPolicy)


def _refuse_with(kind: type, model: Any, why: str) -> None:
    """Refuse to save a model that has a module of some kind, by words that follow its name."""
    for name, module in model.named_modules():
        if isinstance(module, kind):
            raise ValueError(f"save_pretrained: {name} {why}")


def _refuse_wrapped_layers(model: Any) -> None:
    for name, module in model.named_modules():
        if name.endswith(".base_layer") and isinstance(module, QuantizedModule):
            raise ValueError(
                f"save_pretrained: {name} is inside a wrapper of peft's, and no model would find it by this "
                f"name. Save the PeftModel, or what its unload() returns; or load the model again."
            )


def forget(model: Any) -> None:
    """Have a model of transformers that was dequantized save as any other; other models are only marked."""
    _mark_as_initialized(model)
    if not is_of_transformers(model):
        return
    from kbit.integrations.transformers import saving, tying

    tying.rename_ties(model)
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = saving.without_experts(model, conversions)
    forget_if_plain(model)


def _mark_as_initialized(model: nn.Module) -> None:
    """Have transformers not draw weights of modules anew that took others' places.

    It does where a model becomes a part of another, whose `post_init` looks for modules that were not marked
    while loading.
    """
    for module in model.modules():
        module._is_hf_initialized = True  # type: ignore[assignment]


def forget_if_plain(model: Any) -> bool:
    """Whether a model of transformers has no quantized layer; then it is saved without kbit's config."""
    if refusals.has_quantized(model):
        return False
    quantizer = getattr(model, "hf_quantizer", None)  # none in a part of a model whose config it has
    if quantizer is not None and isinstance(quantizer.quantization_config, QuantizationPolicy):
        quantizer.remove_quantization_config(model)
        _mark_configs(model, quantized=False)
    return True


def _mark_configs(model: nn.Module, quantized: bool) -> None:
    """Have attention of transformers know whether the dtype of a weight may be that of codes.

    It asks the config that it was made of for this attribute, whatever its value. That is the model's, or one
    of its parts'.
    """
    if "transformers.configuration_utils" not in sys.modules:
        return  # then nothing was made of one
    from transformers.configuration_utils import PreTrainedConfig

    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and quantized:
            config._is_quantized = True
        elif isinstance(config, PreTrainedConfig):
            vars(config).pop("_is_quantized", None)


def _tell(model: Any, policy: QuantizationPolicy) -> None:
    from kbit.integrations.transformers import names, saving, tying
    from kbit.integrations.transformers.quantizer import KbitHfQuantizer

    if forget_if_plain(model):
        return
    tying.rename_ties(model)
    stated = names.stated_policy(model, policy)
    model.hf_quantizer = KbitHfQuantizer(stated, pre_quantized=True)
    config = model.hf_quantizer.quantization_config
    model.is_quantized, model.quantization_method = True, config.quant_method
    model.config.quantization_config = config
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = names.own_conversions(model)
    model._weight_conversions = saving.with_experts(model, conversions)
