"""Trained adapters that are loaded: what adapts experts in 16 bits has no place on quantized ones.

peft and transformers leave such weights out and go on, as they do for all that a model has no place for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from peft.functional import delete_adapter
from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from kbit.format.errors import KbitError
from kbit.format.words import counted, first_of
from kbit.integrations.peft.targets import WRAPPED
from kbit.nn import KbitExperts


def load_whole(model: nn.Module, load: Callable[[], Any]) -> Any:
    """Load an adapter, or leave the model as it was if weights of it for quantized experts are left out.

    Args:
        model: what the adapter is loaded into, a peft model or none yet.
        load: does it; its result has `unexpected_keys`, unless it calls another `load` that is guarded.

    Returns:
        What `load` does.

    Raises:
        KbitError: some are; the message says what to do instead.
    """
    bare = not any(isinstance(module, BaseTunerLayer) for module in model.modules())
    known = set(_configs(model))
    try:
        result = load()
        _refuse_left_out(model, getattr(result, "unexpected_keys", ()))
    except KbitError:
        if bare:
            _unwrap(model)
        for name in set(_configs(model)) - known:
            _take_off(model, name)
        raise
    return result


def _configs(model: nn.Module) -> dict[str, Any]:
    return getattr(model, "peft_config", None) or {}


def _refuse_left_out(model: nn.Module, unexpected: Iterable[str]) -> None:
    """Raise KbitError if one of these names of the model's is in a module of quantized experts."""
    experts = [
        f".{name.removesuffix(f'.{WRAPPED}')}."
        for name, module in model.named_modules()
        if isinstance(module, KbitExperts)
    ]
    left = [name for name in unexpected if any(inside in f".{name}" for inside in experts)]
    if left:
        raise KbitError(
            f"load_adapter: the adapter was trained on experts in 16 bits, which are quantized here, so "
            f"{counted(len(left), 'weight')} of it cannot be applied: {first_of(left, shown=2)}. Load it on "
            f"the 16-bit model, merge it there (merge_and_unload) and quantize the result; or train one on "
            f'the quantized model, with "experts" among the target_modules.'
        )


def _unwrap(model: nn.Module) -> None:
    """Give a model its own layers again; what it had no adapter of before, it has none of then."""
    inside: tuple[str, ...] = ()
    for name, module in list(model.named_modules()):
        if name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            model.set_submodule(name, module.get_base_layer())
        elif isinstance(module, AuxiliaryTrainingWrapper):
            model.set_submodule(name, module.original_module)
        else:
            continue
        inside = (*inside, f"{name}.")
    vars(model).pop("peft_config", None)
    vars(model).pop("_hf_peft_config_loaded", None)  # of transformers; its class says that none is


def _take_off(model: nn.Module, name: str) -> None:
    """Delete an adapter from a model that has others."""
    config = _configs(model).pop(name)
    delete_adapter(model, name, PEFT_TYPE_TO_PREFIX_MAPPING[config.peft_type])
