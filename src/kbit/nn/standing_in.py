"""Functions of other libraries that others stand in for, for a while."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Found = TypeVar("Found")
_log = logging.getLogger(__name__)
_lock = threading.Lock()
# (id of the owner, name) -> the owner's own, and by how many threads or contexts it is replaced now.
_own: dict[tuple[int, str], tuple[Any, int]] = {}


@contextlib.contextmanager
def standing_in(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is what `make` makes of it, in every thread, until the last such context is left.

    Args:
        owner: a module or a class, or a dict.
        name: of its function.
        make: called with the function when nothing stands in for it yet.
    """
    key = id(owner), name
    with _lock:
        own, users = _own.get(key, (None, 0))
        if not users:
            own = owner[name] if isinstance(owner, dict) else getattr(owner, name)
            _put(owner, name, make(own))
        _own[key] = own, users + 1
    try:
        yield
    finally:
        with _lock:
            own, users = _own.pop(key)
            if users > 1:
                _own[key] = own, users - 1
            else:
                _put(owner, name, own)


def _put(owner: Any, name: str, function: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = function
    else:
        setattr(owner, name, function)


def is_on_gpu(x: torch.Tensor) -> bool:
    """Whether a kernel may stand in for operators on a tensor; tests have it say so on a CPU, too."""
    return x.is_cuda


def trial(
    check: Callable[Concatenate[Any, Given], Found],
) -> Callable[Concatenate[Any, Given], Found | None]:
    """Decorates what tries a module or a function, its first argument: whether a kernel computes the same.

    It runs without gradients. Where it raises, as for a class that wants to be called otherwise, it gives
    None, and says why to who asks by logging's level DEBUG.
    """

    @functools.wraps(check)
    def try_it(what: Any, *given: Given.args, **named: Given.kwargs) -> Found | None:
        try:
            with torch.no_grad():
                return check(what, *given, **named)
        except Exception:
            name = getattr(what, "__qualname__", type(what).__qualname__)
            _log.debug("%s could not be tried, and stays as it is", name, exc_info=True)
            return None

    return try_it
