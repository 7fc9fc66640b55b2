"""What transformers calls a cache, in arguments and in outputs: past_key_values, and from 5.24 on cache.

Later releases take the old name, too, but warn; so models are called by the name that they have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from kbit.nn.attention_layers import CACHE, FORMER_CACHE

CACHE_NAMES = (CACHE, FORMER_CACHE)


@functools.cache
def cache_name() -> str:
    """The name that the installed transformers has."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    fields = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    return next(name for name in CACHE_NAMES if name in fields)


def with_cache(cache: Any, named: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments of a model, one of its layers or `generate`, or fields of an output, with this cache."""
    return {**without_cache(named or {}), cache_name(): cache}


def without_cache(named: Mapping[str, Any]) -> dict[str, Any]:
    """The same without any."""
    return {name: value for name, value in named.items() if name not in CACHE_NAMES}


def cache_in(named: Mapping[str, Any]) -> Any:
    """The cache among such arguments or fields, by either name, or None."""
    return next((named[name] for name in CACHE_NAMES if named.get(name) is not None), None)
