"""`from_pretrained(key_mapping=...)`: how else tensors are called in a model's files.

transformers renames by it, in front of its own renamings, and tells no quantizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from kbit.integrations.on_import import wrap_method
from kbit.integrations.transformers.inference_loads import may_leave

_given: ContextVar[Mapping[str, str] | None] = ContextVar("key_mapping", default=None)


def key_mapping() -> Mapping[str, str] | None:
    """That of the model which is being loaded: {pattern: replacement}."""
    return _given.get()


def guard_loading(module: ModuleType) -> None:
    """Have loads of models say what theirs is, and kbit's leave `torch.inference_mode`.

    Args:
        module: transformers.modeling_utils.
    """
    wrap_method(module.PreTrainedModel, "from_pretrained", _remembering)


def _remembering(original: Any) -> Any:
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        before = _given.set(kwargs.get("key_mapping"))
        try:
            with may_leave():
                return original(cls, *args, **kwargs)
        finally:
            _given.reset(before)

    return from_pretrained
