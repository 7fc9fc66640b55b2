"""Calls of a model that end where all that somebody listens to has run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn


class _Enough(Exception):
    """The rest of a call is of no use."""


def _behind(model: nn.Module, names: Sequence[str]) -> nn.Module | None:
    """What models call when named modules have run: the next in the list that these are in, or the head."""
    for list_name, layers in model.named_modules():
        prefix = list_name + "."
        if isinstance(layers, nn.ModuleList) and all(name.startswith(prefix) for name in names):
            last = max(int(name[len(prefix) :].partition(".")[0]) for name in names)
            if last + 1 < len(layers):
                return layers[last + 1]
            break  # lists within are of parts of its layers
    head = getattr(model, "get_output_embeddings", None)
    found: nn.Module | None = head() if callable(head) else None
    return found


@contextlib.contextmanager
def ending_early(model: nn.Module, names: Sequence[str]) -> Iterator[Callable[[Callable[[], object]], None]]:
    """What calls a model for the sake of some of its modules.

    The first call runs whole. Where it shows that none of the modules is called behind the place where the
    next layer, or the head, is, others end there.

    Args:
        model: what is called.
        names: of the modules that have to run, one at least; hooks that are theirs already run before.

    Yields:
        What runs a call, given as a function.
    """
    place = _behind(model, names)
    reached = late = ends = False

    def listen(*_: Any) -> None:
        nonlocal late
        late = late or reached

    def reach(*_: Any) -> None:
        nonlocal reached
        if ends:
            raise _Enough
        reached = True

    def run(call: Callable[[], object]) -> None:
        nonlocal reached, ends
        reached = False
        with contextlib.suppress(_Enough):
            call()
            ends = reached and not late

    handles = [model.get_submodule(name).register_forward_pre_hook(listen) for name in names]
    handles += [] if place is None else [place.register_forward_pre_hook(reach)]
    try:
        yield run
    finally:
        for handle in handles:
            handle.remove()
