"""transformers: a quantization config, a quantizer, and their registration.

`AutoModelForCausalLM.from_pretrained(folder, quantization_config=kbit.KbitConfig(bits=4))` quantizes while it
loads; `save_pretrained` and `from_pretrained` round-trip the result. Importing this package does not import
transformers; asking it for `KbitConfig` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbit.integrations.transformers.config import KbitConfig

__all__ = ["KbitConfig"]


def __getattr__(name: str) -> Any:
    if name == "KbitConfig":
        from kbit.integrations.transformers.config import KbitConfig

        return KbitConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
