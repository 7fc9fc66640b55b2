"""Continuous batching with PyTorch's flash attention, where no package with another is installed.

transformers would then batch by scaled_dot_product_attention: with a mask that the CPU makes at every step,
keys and values copied for every head, and no step prepared while another one runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

import torch

from kbit.nn.rotary import fused_rotary, rotary_modules

NAME = "kbit_flash"  # among transformers' ways of computing attention; "flash" in it says: without masks
_INFER = "infer_max_batch_tokens_and_num_blocks"
_LARGEST_HEAD = 256
_SIZES_OF_HEADS = ("head_dim", "qk_head_dim")
_rotary = contextlib.ExitStack()  # until the server ends


def speed_up() -> None:
    """Have models that use "sdpa" attend by PyTorch's flash attention when they are batched continuously.

    Their rotary embeddings become one kernel, too.
    """
    from transformers import modeling_flash_attention_utils as utils
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager

    _register()
    _bound_batches()
    imports, switch = utils._lazy_imports, ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(imports)
    def imported(implementation: str | None, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        if (implementation or "").rpartition("|")[2] != NAME:
            return imports(implementation, *arguments, **named)
        return None, flash_attn_varlen_func, None, utils._pad_input, utils._unpad_input

    @functools.wraps(switch)
    def switched(self: Any, model: Any, *arguments: Any, **named: Any) -> None:
        switch(self, model, *arguments, **named)
        way = model.config._attn_implementation
        if way in ("sdpa", "paged|sdpa") and takes(model):
            model.set_attn_implementation(way.replace("sdpa", NAME))
        _rotary.enter_context(fused_rotary(rotary_modules(model)))

    utils._lazy_imports = imported
    ContinuousBatchingManager.switch_to_cb_friendly_attn = switched


def _register() -> None:
    """What transformers does around a package's function, and without a mask, under our name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface(), AttentionMaskInterface()
    for prefix in ("", "paged|"):
        if f"{prefix}flash_attention_2" in functions:
            AttentionInterface.register(prefix + NAME, functions[f"{prefix}flash_attention_2"])
            AttentionMaskInterface.register(prefix + NAME, masks["flash_attention_2"])


def _bound_batches() -> None:
    """Have batches take at most as many tokens as newer versions of transformers say, unless told otherwise.

    Older ones take what memory is free once a cache of a given size is in it: without masks that is millions,
    and every step makes a list of so many.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler as Handler

    infer = getattr(Handler, _INFER, None)
    if infer is None:
        return

    @functools.wraps(infer)
    def inferred(self: Any) -> tuple[int, int]:
        tokens, blocks = infer(self)
        given = self.cb_config.max_batch_tokens is not None
        return (tokens if given else min(tokens, self._default_max_batch_tokens)), blocks

    setattr(Handler, _INFER, inferred)


def takes(model: Any) -> bool:
    """Whether PyTorch's kernel takes a model's attention."""
    config = model.config.get_text_config()
    sizes = [getattr(config, name, None) or 0 for name in _SIZES_OF_HEADS]
    wanted = getattr(model, "_compatible_flash_implementations", None)  # with sinks, say
    supported = bool(model._supports_flash_attn) and wanted is None and max(sizes) <= _LARGEST_HEAD
    return supported and model.dtype in (torch.float16, torch.bfloat16) and _has_kernel(model.device)


def _has_kernel(device: torch.device) -> bool:
    ampere = (8, 0)
    return (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= ampere and _varlen() is not None
    )


@functools.cache
def _varlen() -> Any:
    """PyTorch's attention of sequences of any lengths, from 2.10 on; None before."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Newer ones want to be told that heads share keys and values, older ones just take them.
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return functools.partial(varlen_attn, enable_gqa=True) if told else varlen_attn


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """The function of that name of the package flash-attn, as far as continuous batching calls it.

    Args:
        q: [tokens, heads, head_dim] of all sequences, one behind the other.
        k, v: [keys, fewer heads, head_dim].
        cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], where each begins.
        max_seqlen_q, max_seqlen_k: of the longest.
        softmax_scale: of the scores; None: head_dim ** -0.5.
        causal: whether a sequence's last token meets its last key, the one before not, and so on.
        window_size: keys before and behind that a token meets; -1: all.

    Returns:
        [tokens, heads, head_dim]; rows of no sequence hold anything.
    """
    window = (window_size[0], 0) if causal else tuple(window_size)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _varlen()(q, k, v, *lengths, scale=softmax_scale, window_size=window)
