"""Gated delta linear attention by few kernels, as `kbit.nn.gated_delta` has it, in layers of 16 bits, too.

Those of quantized models have it always. torch.compile fuses most of what it replaces by itself.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kbit.backends.cuda.gated_delta import takes
from kbit.nn.delta_families import FAMILIES
from kbit.nn.gated_delta import by_kernels_or
from kbit.nn.standing_in import standing_in


def by_own_kernels(config: Any) -> bool:
    """Whether a model's linear attention is one that kernels of ours compute, of prompts as of steps."""
    packages = [family for family in FAMILIES.values() if type(config).__module__.startswith(family.package)]
    if not packages or config.linear_key_head_dim != config.linear_value_head_dim:
        return False
    ratio = config.linear_num_value_heads / config.linear_num_key_heads
    taps, by_heads = config.linear_conv_kernel_dim, packages[0].by_heads
    return takes(config.linear_key_head_dim, taps, ratio, by_heads)


@contextlib.contextmanager
def fused_linear_attention() -> Iterator[None]:
    """Layers of `FAMILIES` run by few kernels between their projections."""
    with contextlib.ExitStack() as stack:
        for name, family in FAMILIES.items():
            if (cls := getattr(sys.modules.get(family.module), name, None)) is not None:
                stack.enter_context(standing_in(cls, "forward", _fused))
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(layer: Any, hidden_states: Any, *given: Any, **named: Any) -> Any:
        return by_kernels_or(functools.partial(own, layer), layer, hidden_states, *given, **named)

    return forward
