"""peft: LoRA on quantized layers, dense ones and fused experts.

`get_peft_model(model, LoraConfig(target_modules=["q_proj", "experts"]))` needs nothing but `import kbit`.
`merge` puts a trained adapter into the weights. Importing this package does not import peft.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

__all__ = ["guard_merging", "merge", "register"]


def register(module: ModuleType) -> None:
    """Have every LoraConfig know kbit's layers.

    Args:
        module: peft.tuners.lora.config.
    """
    config: Any = module.LoraConfig
    original = config.__post_init__
    if getattr(original, "knows_kbit", False):
        return

    def post_init(self: Any) -> None:
        from kbit.integrations.peft.layers import LAYERS

        original(self)
        self._register_custom_module(LAYERS)

    post_init.knows_kbit = True  # type: ignore[attr-defined]
    config.__post_init__ = post_init


def guard_merging(module: ModuleType) -> None:
    """Have peft refuse to merge adapters that kbit cannot: they would be added to codes.

    Args:
        module: peft.tuners.tuners_utils.
    """
    tuner: Any = module.BaseTuner
    if getattr(tuner.merge_adapter, "knows_kbit", False):
        return
    for name in ("merge_adapter", "merge_and_unload"):
        setattr(tuner, name, _guarded(getattr(tuner, name)))


def _guarded(original: Any) -> Any:
    @functools.wraps(original)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        from kbit.integrations.peft.merging import check_tuners

        check_tuners(self.model)
        return original(self, *args, **kwargs)

    guarded.knows_kbit = True  # type: ignore[attr-defined]
    return guarded


def merge(model: Any, requantize: bool = True) -> Any:
    """Put the active adapters of a peft model into its weights; see `merge` in `merging`."""
    from kbit.integrations.peft.merging import merge as merge_now

    return merge_now(model, requantize)
