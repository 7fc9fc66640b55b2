"""NVFP4HfQuantizer: what transformers calls around loading and saving a model with NVFP4 layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from kbit.format.names import holder_of, module_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.safetensors_header import TensorInfo
from kbit.format.unmatched import unmatched
from kbit.integrations.nvfp4.config import QUANT_METHOD, NVFP4Config
from kbit.integrations.transformers.in_memory import InMemory
from kbit.nn.fused_experts import WEIGHTS
from kbit.nn.support import left_alone, unsupported
from kbit.nvfp4.formats.names import CODES, GLOBAL_SCALE, SCALES
from kbit.nvfp4.layers import NVFP4Module, replace_layers, replaceable
from kbit.nvfp4.readers.checks import check_global_scale, check_scale_bytes

# Of the layers that were replaced: models initialize some by name.
_WEIGHTS = ("weight", *WEIGHTS)

logger = logging.get_logger(__name__)


class NVFP4HfQuantizer(InMemory, HfQuantizer):
    """Quantizes a model right after it is loaded, layer by layer, or loads what is quantized.

    The unquantized model is in memory first; `kbit quantize` and `KbitConfig` are for machines where it does
    not fit.
    """

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        _refuse_split(model)
        if not self.pre_quantized:
            return model
        # Imported here because transformers' registry, which imports this module, comes before its loader.
        from kbit.integrations.transformers.placement import mark_initialized, read_index

        index = read_index(checkpoint_files)
        if index is None:
            raise ValueError(
                "an NVFP4 checkpoint is loaded from a folder of safetensors files; got a state dict or "
                "pickled weights."
            )
        config = self.quantization_config
        names = replace_layers(model, config.settings(), _chooser(model, config, index), empty=True)
        targets = {to: index[name] for name, to in _parameters(model, index).items()}
        for name in names:
            _check_stored(name, model.get_submodule(name), targets)
            mark_initialized(model.get_submodule(name), _WEIGHTS)
        return model

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        _refuse_split(model)
        if not self.pre_quantized:
            _warn_about_unmatched(model, config)
            names = replace_layers(model, config.settings(), config.chooses)
            if not names:
                logger.warning("NVFP4Config chose no layer of %s.", type(model).__name__)
            _report(model, config)
            return model
        from kbit.integrations.transformers.placement import unmark_initialized

        for name, module in model.named_modules():
            if isinstance(module, NVFP4Module):
                unmark_initialized(module, _WEIGHTS)
                _check_loaded(name, module)
        _report(model, config)
        return model

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Never while loading: layers are quantized afterwards."""
        return False

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        raise NotImplementedError(
            "a model with NVFP4 layers cannot be dequantized as a whole. Load the unquantized checkpoint; "
            "kbit.nvfp4.dequantize_nvfp4(layer.quantized(name)) gives single weights."
        )

    def is_serializable(self) -> bool:
        """Whether save_pretrained works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Activations are quantized without a gradient."""
        return False


def _refuse_split(model: Any) -> None:
    from kbit.integrations.transformers.inplace import is_planned_over_ranks

    if is_planned_over_ranks(model):
        raise ValueError(
            "NVFP4Config: NVFP4 layers are not split over ranks. Load the model without tp_plan and expert "
            "parallelism, or split it in k bits: quantization_config=kbit.KbitConfig(...)."
        )


def _warn_about_unmatched(model: Any, config: NVFP4Config) -> None:
    layers = [name for names, _ in replaceable(model, lambda name: True) for name in names]
    policy = QuantizationPolicy(modules_to_not_convert=config.modules_to_not_convert)
    found = unmatched(policy, layers, [name for name, _ in model.named_modules()])
    if found:
        warnings.warn(found, stacklevel=2)


def _report(model: Any, config: NVFP4Config) -> None:
    """Warn of large parameters that stay in 16 bits."""
    from kbit.integrations.transformers.report import large_parameters

    alone = left_alone(model)

    def why(parameter: str) -> str | None:
        name = holder_of(parameter)
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            return "embeddings stay as they are"
        reason = config.why_not(name) or unsupported(module) or alone.get(name)
        return reason or "its weight is that of another layer, too, or the checkpoint has it unquantized"

    left = large_parameters(model, why)
    if left is not None:
        logger.warning("%s", left)


def _chooser(model: Any, config: NVFP4Config, index: Iterable[str]) -> Callable[[str], bool]:
    """Which modules of a checkpoint are in NVFP4: those with codes, and those quantizing would choose.

    `_check_stored` refuses the latter if there are no codes. Names in the files count as well as the model's:
    in a model without its head, modules have no "model." in front.
    """
    originals = {name: _original(name) for name in index}
    coded = {module_of(original) for name, original in originals.items() if name != original}
    stored = {module_of(to): module_of(name) for name, to in _parameters(model, originals.values()).items()}

    alone = left_alone(model)
    tied = {module_of(name) for pair in getattr(model, "all_tied_weights_keys", {}).items() for name in pair}

    def choose(name: str) -> bool:
        if stored.get(name) in coded:
            return True
        return name not in alone and name not in tied and config.chooses(name, stored.get(name, name))

    return choose


def _original(name: str) -> str:
    """The parameter that codes are of; the name itself if it is not that of codes.

    >>> _original("q_proj.weight_codes"), _original("experts.down_codes"), _original("q_proj.bias")
    ('q_proj.weight', 'experts.down_proj', 'q_proj.bias')
    """
    parameter = name.removesuffix(CODES)
    return parameter if parameter == name or parameter.endswith("weight") else f"{parameter}_proj"


def _parameters(model: Any, index: Iterable[str]) -> dict[str, str]:
    """{name of a checkpoint's tensor: the model's parameter}, as transformers' loader renames them."""
    from kbit.integrations.transformers.names import loading_transforms, parameter_of

    transforms, state, prefix = loading_transforms(model), model.state_dict(), model.base_model_prefix
    return {name: parameter_of(name, transforms, prefix, state)[0] for name in index}


def _check_stored(name: str, module: NVFP4Module, index: Mapping[str, TensorInfo]) -> None:
    """Compare a layer's parts with the headers of the files, before any tensor is read."""
    for part, parameter in module.parts():
        info = index.get(f"{name}.{part}")
        if info is None:
            raise ValueError(
                f"the checkpoint has no tensor {name}.{part}, which its config implies. Is the config that "
                f"of another model, or does modules_to_not_convert lack this module's whole name?"
            )
        if info.dtype != parameter.dtype or info.shape != tuple(parameter.shape):
            raise ValueError(
                f"{info.file}: tensor {name}.{part} must be {parameter.dtype} {tuple(parameter.shape)}, got "
                f"{info.dtype} {info.shape}. Config and weights are not of one model."
            )


def _check_loaded(name: str, module: NVFP4Module) -> None:
    """Refuse scales that no quantizer writes, and freeze the parts: the loader makes floats trainable."""
    for part, parameter in module.parts():
        parameter.requires_grad_(False)
        if parameter.device.type == "meta":
            continue
        if part.endswith(GLOBAL_SCALE):
            for value in parameter.flatten().tolist():
                check_global_scale(value, f"{name}.{part}")
        elif part.endswith(SCALES):
            check_scale_bytes(parameter.data, f"{name}.{part}")


# Not by register_quantizer, which refuses a module that is imported anew.
AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = NVFP4HfQuantizer
