"""The `quantization_config` of what is loaded: that it is one, and kbit's where the weights are kbit's codes.

A part of a composite model, such as its text model, has that of the whole.

Of one that it does not know transformers warns, and draws at random whatever it finds no weights of.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kbit.format.model_files import CONFIG_NAME
from kbit.format.names import ABSMAX, PACKED, original_of
from kbit.format.policy import QUANT_METHOD
from kbit.format.words import first_of
from kbit.integrations.on_import import wrap_method


def guard_configs(module: ModuleType) -> None:
    """Have configs refused whose section transformers would stumble over, with a TypeError or AttributeError.

    Args:
        module: transformers.configuration_utils.
    """
    wrap_method(module.PreTrainedConfig, "get_config_dict", _reading)


def _reading(original: Any) -> Any:
    def get_config_dict(cls: Any, *args: Any, **kwargs: Any) -> Any:
        config, rest = original(cls, *args, **kwargs)
        _refuse_damaged(config, str(args[0] if args else kwargs["pretrained_model_name_or_path"]))
        _hand_down(config, cls)
        return config, rest

    return get_config_dict


def _hand_down(config: Mapping[str, Any], cls: Any) -> None:
    """Give the section of a composite model to the part whose config is asked for, if it is kbit's."""
    section, kind = config.get("quantization_config") or {}, cls.model_type
    if not str(section.get("quant_method")).startswith(QUANT_METHOD) or config.get("model_type") == kind:
        return
    for key, part in config.items():
        # As from_pretrained looks for a part.
        if isinstance(part, dict) and (key == cls.base_config_key or part.get("model_type") == kind):
            part.setdefault("quantization_config", section)


def _refuse_damaged(config: Mapping[str, Any], where: str) -> None:
    section = config.get("quantization_config")
    if section is None:
        return
    if isinstance(section, Mapping) and isinstance(section.get("quant_method"), Hashable):
        return
    file = Path(where) / CONFIG_NAME if Path(where).is_dir() else where
    raise ValueError(
        f"{file}: quantization_config must be an object that names its quant_method, got {section!r:.80}. "
        f"Fetch config.json again; if the model is not quantized, take it out."
    )


def guard_weights(module: ModuleType) -> None:
    """Have loads refused that found codes of kbit's and have no use for them.

    Args:
        module: transformers.modeling_utils.
    """
    # Called between loading and drawing what is missing, with what was found: no file is read for this.
    wrap_method(module.PreTrainedModel, "mark_tied_weights_as_initialized", _after_loading)


def _after_loading(original: Any) -> Any:
    def mark_tied_weights_as_initialized(self: Any, loading_info: Any) -> None:
        # Heads that this class of model lacks may be left over of a checkpoint that is read as kbit's.
        if not str(getattr(self, "quantization_method", None)).startswith(QUANT_METHOD):
            refuse_codes(self, loading_info.unexpected_keys)
        original(self, loading_info)

    return mark_tied_weights_as_initialized


def refuse_codes(model: Any, names: Iterable[str]) -> None:
    """Refuse to load codes of kbit's as anything else.

    Args:
        model: a PreTrainedModel.
        names: of tensors that are not loaded as codes.

    Raises:
        ValueError: some are the codes of weights; the message names them.
    """
    known = {*names}
    coded = [name for name in known if name == original_of(name) + PACKED]
    coded = sorted(name for name in coded if original_of(name) + ABSMAX in known)
    if not coded:
        return
    section = getattr(model.config, "quantization_config", None)
    stated = isinstance(section, Mapping) and f"quant_method {section.get('quant_method')!r:.40}"
    folder = getattr(model, "name_or_path", "")
    raise ValueError(
        f"{folder or 'the state dict'} holds weights that kbit has quantized, but its config has "
        f"{stated or 'no quantization_config of kbit'}, so they would be drawn at random: {first_of(coded)}. "
        f"Fetch {CONFIG_NAME} again, or quantize the model again."
    )
