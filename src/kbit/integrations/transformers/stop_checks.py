"""`generate` looks a step late whether an answer has ended, so that the GPU never waits for the host.

transformers looks behind every token, which waits for the GPU, and prepares the next step while that has
nothing to do. It has a check that looks one step late, queues the next step meanwhile, and takes back the one
step too many behind an answer's last token; but not on CUDA's GPUs. Here it is for them. What stands in for
its condition stays, as nothing tells when a call of `generate` ends; other caches get transformers' answer.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

_caches: weakref.WeakSet[Any] = weakref.WeakSet()


def check_late(cache: Any) -> None:
    """Calls of `generate` with this cache look a step late, where it is on a GPU and not returned.

    Args:
        cache: of transformers; not kept alive. One that is returned would have to forget the step too many.
    """
    from transformers.generation import utils

    deferred = getattr(utils, "DeferredStopCheck", None)
    own = getattr(deferred, "is_supported", None)
    if deferred is None or own is None:
        return
    _caches.add(cache)
    if not getattr(own, "stands_for_kbit", False):
        deferred.is_supported = staticmethod(_or_one_of_ours(own))


def _or_one_of_ours(own: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(own)
    def is_supported(
        device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool, **more: Any
    ) -> bool:
        ours = device.type == "cuda" and cache is not None and cache in _caches
        if ours and not cache_is_returned and not is_assistant:
            return True
        return own(device, cache, cache_is_returned, is_assistant=is_assistant, **more)

    is_supported.stands_for_kbit = True  # type: ignore[attr-defined]
    return is_supported
