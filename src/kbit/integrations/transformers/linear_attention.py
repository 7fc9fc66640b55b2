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
from kbit.nn.gated_delta import by_kernels
from kbit.nn.standing_in import standing_in
from kbit.ops.gated_delta_schemas import LAYER

# Where transformers has the class whose forward this stands in for, by the model's own order of projections.
_MODULE = "transformers.models.qwen3_next.modeling_qwen3_next"


def by_own_kernels(config: Any) -> bool:
    """Whether a model's linear attention is one that kernels of ours compute, of prompts as of steps."""
    if config.model_type != "qwen3_next" or config.linear_key_head_dim != config.linear_value_head_dim:
        return False
    ratio = config.linear_num_value_heads / config.linear_num_key_heads
    return takes(config.linear_key_head_dim, config.linear_conv_kernel_dim, ratio)


@contextlib.contextmanager
def fused_linear_attention() -> Iterator[None]:
    """Layers of Qwen3-Next run by few kernels between their projections."""
    cls = getattr(sys.modules.get(_MODULE), LAYER, None)
    if cls is None:
        yield
        return
    with standing_in(cls, "forward", _fused):
        yield


def _fused(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(
        layer: Any, hidden_states: Any, cache_params: Any = None, attention_mask: Any = None, **named: Any
    ) -> Any:
        y = by_kernels(layer, hidden_states, cache_params, attention_mask, named)
        return y if y is not None else own(layer, hidden_states, cache_params, attention_mask, **named)

    return forward
