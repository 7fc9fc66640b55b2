"""What decoding steps, and rests of prompts, run in place of transformers' own: attention and what is before
it, its mask, rotary embeddings and their angles, updates of caches, linear attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kbit.integrations.transformers.angles import fused_angles
from kbit.integrations.transformers.attention import MASKED_RESTS, rests_without_masks, shared_heads
from kbit.integrations.transformers.attention_heads import fused_heads
from kbit.integrations.transformers.latent_attention import fused_latents
from kbit.integrations.transformers.linear_attention import fused_linear_attention
from kbit.integrations.transformers.static_caches import fused_updates
from kbit.nn.rotary import fused_rotary, rotary_modules


@contextlib.contextmanager
def step_kernels(model: Any) -> Iterator[None]:
    """Few kernels instead of many, and no copies of the cache, where they give what the model's own give.

    In the whole process meanwhile, and for other models as well, but attention.
    """
    rotary = fused_rotary(rotary_modules(model))
    with contextlib.ExitStack() as stack:
        for each in (shared_heads(), rotary, fused_updates(), fused_heads(model), fused_latents(model)):
            stack.enter_context(each)
        stack.enter_context(fused_angles(model))
        stack.enter_context(fused_linear_attention())
        yield


@contextlib.contextmanager
def rest_kernels(
    model: Any, lengths: dict[torch.device, torch.Tensor], keys: int | None
) -> Iterator[Callable[[], int] | None]:
    """Those of `step_kernels` for several tokens behind those that a cache of a fixed size holds.

    Args:
        model: of transformers.
        lengths: of the cache, see `rests_without_masks`.
        keys: as many as the cache holds behind these tokens, or more, and attention is given a mask of them;
            None: without one.

    Yields:
        Without masks, in how many layers' calls that was so.

    Raises:
        MaskWantedError: from within, see `rests_without_masks`.
    """
    attention = rests_without_masks(lengths) if keys is None else shared_heads(MASKED_RESTS)
    rotary, updates = fused_rotary(rotary_modules(model)), fused_updates(keys=keys)
    with attention as unmasked, rotary, updates, fused_angles(model), fused_linear_attention():
        yield unmasked
