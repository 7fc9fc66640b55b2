"""peft: LoRA on quantized layers, dense ones and fused experts.

`get_peft_model(model, LoraConfig(target_modules=["q_proj", "experts"]))` needs nothing but `import kbit`.
`merge` puts a trained adapter into the weights. Importing this package does not import peft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from kbit.format.names import PACKED
from kbit.integrations.on_import import wrap_method
from kbit.nn import KbitExperts, replace

__all__ = ["guard_loading", "guard_merging", "guard_models", "merge", "register"]


def register(module: ModuleType) -> None:
    """Have every LoraConfig know kbit's layers.

    Args:
        module: peft.tuners.lora.config.
    """
    wrap_method(module.LoraConfig, "__post_init__", _registering)


def _registering(original: Any) -> Any:
    def post_init(self: Any) -> None:
        from kbit.integrations.peft.layers import LAYERS

        original(self)
        self._register_custom_module(LAYERS)

    return post_init


def guard_merging(module: ModuleType) -> None:
    """Have peft refuse to merge adapters that kbit cannot, since they would be added to codes, to train codes
    and to adapt layers that cannot be, and say so where targets leave out experts that they would adapt in 16
    bits. `quantize_model` refuses models with adapters.

    Args:
        module: peft.tuners.tuners_utils.
    """
    for name in ("merge_adapter", "merge_and_unload"):
        wrap_method(module.BaseTuner, name, _guarded)
    wrap_method(module.BaseTuner, "inject_adapter", _named)
    if _refuse_adapters not in replace.before_quantizing:
        replace.before_quantizing.append(_refuse_adapters)


def _refuse_adapters(model: Any) -> None:
    from kbit.integrations.peft.merging import refuse_adapters

    refuse_adapters(model)


def _guarded(original: Any) -> Any:
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        from kbit.integrations.peft.merging import check_tuners

        check_tuners(self.model)
        return original(self, *args, **kwargs)

    return guarded


def _named(original: Any) -> Any:
    @functools.wraps(original)
    def inject(self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        from kbit.integrations.peft import targets

        targets.refuse_trained_codes(model, self.peft_config[adapter_name])
        targets.check(self, model, adapter_name)
        targets.warn_of_left_out(model, self.peft_config[adapter_name])
        return original(self, model, adapter_name, *args, **kwargs)

    return inject


def guard_models(module: ModuleType) -> None:
    """Have peft find a quantized table for prompt and prefix tuning, take no dtype from codes, and refuse
    what it would leave half done.

    It looks for a parameter with a row per token, and drops ".weight" from its name to have the table's. The
    prompts of adaption prompt and the scales of UniLoRA have the dtype of a weight, which is that of codes.

    Args:
        module: peft.peft_model.
    """
    from peft.mixed_model import PeftMixedModel
    from peft.tuners.adaption_prompt.layer import _BaseAdaptedAttention
    from peft.tuners.adaption_prompt.model import AdaptionPromptModel
    from peft.tuners.lora.model import LoraModel
    from peft.tuners.unilora.layer import UniLoraLayer

    wrap_method(module.PeftModel, "_setup_prompt_encoder", _finding_tables)
    wrap_method(module.PeftModel, "load_adapter", _whole)
    wrap_method(module.PeftModel, "from_pretrained", _whole_on_base)
    wrap_method(PeftMixedModel, "from_pretrained", _whole_on_base)
    wrap_method(_BaseAdaptedAttention, "__init__", _of_floats)
    wrap_method(AdaptionPromptModel, "add_adapter", _on_whole_layers)
    wrap_method(UniLoraLayer, "update_scaling", _of_float_scales)
    wrap_method(LoraModel, "add_weighted_adapter", _without_experts)


def guard_loading(module: ModuleType) -> None:
    """Have transformers, which loads adapters itself, refuse those of which it would leave weights out.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "load_adapter", _whole)


def _whole(original: Any) -> Any:
    def load_adapter(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _load_whole(self, partial(original, self, *args, **kwargs))

    return load_adapter


def _whole_on_base(original: Any) -> Any:
    def from_pretrained(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return _load_whole(model, partial(original, cls, model, *args, **kwargs))

    return from_pretrained


def _load_whole(model: Any, load: Callable[[], Any]) -> Any:
    # Asked first, so that other models need no release of peft that kbit knows.
    if not isinstance(model, nn.Module) or not any(isinstance(one, KbitExperts) for one in model.modules()):
        return load()
    from kbit.integrations.peft.loading import load_whole

    return load_whole(model, load)


def _of_floats(original: Any) -> Any:
    def init(self: Any, kind: str, length: int, model: Any, target_dtype: Any = torch.float32) -> None:
        if not target_dtype.is_floating_point:
            target_dtype = getattr(model.config, "dtype", None) or torch.float32
        original(self, kind, length, model, target_dtype)

    return init


def _on_whole_layers(original: Any) -> Any:
    def add(self: Any, *args: Any, **kwargs: Any) -> None:
        from kbit.integrations.peft.layers import refuse_split

        for layer in self.model.modules():
            refuse_split(layer)
        original(self, *args, **kwargs)

    return add


def _of_float_scales(original: Any) -> Any:
    """Scales are at most 1, so cast to a dtype of codes they would be 0 and nothing would train."""

    def update(self: Any, adapter_name: str, scales_a: torch.Tensor, scales_b: torch.Tensor) -> None:
        original(self, adapter_name, scales_a, scales_b)
        if self.get_base_layer().weight.is_floating_point():
            return
        for held, scales in ((self.unilora_scales_A, scales_a), (self.unilora_scales_B, scales_b)):
            if adapter_name in held:
                held[adapter_name] = scales.to(held[adapter_name].device)

    return update


def _without_experts(original: Any) -> Any:
    def add(self: Any, adapters: list[str], *args: Any, **kwargs: Any) -> None:
        from kbit.integrations.peft.experts import refuse_weighted

        refuse_weighted(self.model, adapters)
        original(self, adapters, *args, **kwargs)

    return add


def _finding_tables(original: Any) -> Any:
    def setup(self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        from kbit.integrations.peft import targets

        targets.refuse_trained_codes(self.base_model, self.peft_config[adapter_name])
        targets.refuse_split_tables(self.base_model)
        searched = [self.base_model, *self.base_model.children()]
        for module in searched:
            vars(module)["get_submodule"] = partial(_submodule_of_codes, module)
        try:
            original(self, adapter_name, *args, **kwargs)
        finally:
            for module in searched:
                vars(module).pop("get_submodule", None)

    return setup


def _submodule_of_codes(module: Any, name: str) -> Any:
    return type(module).get_submodule(module, name.removesuffix(PACKED))


def merge(model: Any, requantize: bool = True) -> Any:
    """Put the active adapters of a peft model into its weights; see `merge` in `merging`."""
    from kbit.integrations.peft.merging import merge as merge_now

    return merge_now(model, requantize)
