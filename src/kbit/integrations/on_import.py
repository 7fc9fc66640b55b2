"""Act once a module of another library has been imported, and wrap the methods of its classes.

Libraries that kbit plugs into take seconds to import, so `import kbit` must not import them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action, complete: str) -> None:
    """Call `action(module)` once module `name` is there. Asking again for the same changes nothing.

    Args:
        name: dotted name of the module.
        action: what to do; it may run twice, so it must be idempotent.
        complete: an attribute of the module that shows that it was imported to its end.
    """
    if not hasattr(sys.modules.get(name), complete):
        if not any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder(name, action))
        if name not in sys.modules:
            return
        # Another thread is importing it, and looked for it before the finder was there. This waits for that.
        with suppress(ImportError):
            importlib.import_module(name)
    module = sys.modules.get(name)
    if module is not None and hasattr(module, complete):
        action(module)


def wrap_method(owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
    """Put `wrap(method)` in a method's place, or a class's. Asking again for the same changes nothing."""
    original: Any = inspect.getattr_static(owner, name)
    of_class = isinstance(original, classmethod)
    original = original.__func__ if of_class else original
    if not getattr(original, "knows_kbit", False):
        wrapped: Any = functools.wraps(original)(wrap(original))
        wrapped.knows_kbit = True
        setattr(owner, name, classmethod(wrapped) if of_class else wrapped)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the other finders do, and has it followed by an action once it is loaded."""

    def __init__(self, name: str, action: Action) -> None:
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) and finder.name == self.name:
                continue
            find_spec = getattr(finder, "find_spec", None)
            spec = find_spec(fullname, path, target) if find_spec else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.action)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._action(module)

    def __getattr__(self, name: str) -> Any:
        # inspect.getsource and friends ask a module's loader for more than the two methods above.
        return getattr(self._loader, name)
