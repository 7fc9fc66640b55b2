"""Loads within `torch.inference_mode`: gradients may be asked for later, and other weights loaded.

Neither is possible with tensors that are made in that mode. Of an unquantized model hardly any are, because
transformers reads weights in threads of its own, which are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

import torch

_load: ContextVar[ExitStack | None] = ContextVar("load", default=None)


@contextmanager
def may_leave() -> Iterator[None]:
    """Around a load: that mode is as before behind it, whether `leave` was called or not."""
    with ExitStack() as stack:
        outer = _load.set(stack)
        try:
            yield
        finally:
            _load.reset(outer)


def leave() -> None:
    """Have the load under way, if it is in that mode, go on outside; quantizers of kbit's call this."""
    stack = _load.get()
    if stack is not None and torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())  # models' own code may write to parameters, as in that mode
