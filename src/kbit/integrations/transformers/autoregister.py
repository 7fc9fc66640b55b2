"""Make transformers know the quantization method "kbit", whichever of the two is imported first.

transformers takes more than a second to import, so `import kbit` must not do it. If transformers is there
already, the classes are registered at once; otherwise a finder waits for the one module that holds the
registry and registers them right after it ran.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kbit.integrations.transformers import inplace

_REGISTRY = "transformers.quantizers.auto"


def install() -> None:
    """Register now, or as soon as transformers' registry is imported. Calling it again changes nothing."""
    inplace.install()
    registry = sys.modules.get(_REGISTRY)
    if registry is not None and hasattr(registry, "register_quantizer"):
        register(registry)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def register(registry: ModuleType) -> None:
    """Add kbit to transformers' tables of quantization methods.

    Args:
        registry: the module transformers.quantizers.auto.
    """
    from kbit.format.policy import QUANT_METHOD
    from kbit.integrations.transformers.config import KbitConfig
    from kbit.integrations.transformers.quantizer import KbitHfQuantizer

    if QUANT_METHOD not in registry.AUTO_QUANTIZATION_CONFIG_MAPPING:
        registry.register_quantization_config(QUANT_METHOD)(KbitConfig)
    if QUANT_METHOD not in registry.AUTO_QUANTIZER_MAPPING:
        registry.register_quantizer(QUANT_METHOD)(KbitHfQuantizer)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the registry as the other finders do, and has it register kbit once it is loaded."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        register(module)

    def __getattr__(self, name: str) -> Any:
        # inspect.getsource and friends ask a module's loader for more than the two methods above.
        return getattr(self._loader, name)
