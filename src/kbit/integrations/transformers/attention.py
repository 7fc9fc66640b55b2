"""Attention of decoding steps by cuDNN, without copies of keys and values; that of prompts without masks.

Several query heads often share a head of keys and values. Where there is a mask, as with every cache of a
fixed size, transformers copies keys and values for each of them, since most of PyTorch's kernels take a mask
or shared heads, not both: of a long cache that is most of a step. cuDNN's kernel takes both.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from kbit.integrations.transformers.additive_masks import additive, additive_mask
from kbit.integrations.transformers.config_parts import all_of

NAME, MASKLESS = "kbit_sdpa", "kbit_causal"  # among transformers' ways of computing attention
# What asks transformers' own function for more than this one does.
_MORE = ("position_bias", "softcap", "cache", "output_attentions")


@contextlib.contextmanager
def shared_heads(model: Any) -> Iterator[None]:
    """Attention of a model that uses "sdpa" runs as here; nothing happens to others."""
    from transformers import AttentionInterface, AttentionMaskInterface

    torch.compiler.assume_constant_result(_ask)
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, additive_mask)
    with _in_place_of_sdpa(model.config, NAME):
        yield


class _Causal(threading.local):
    """Whether attention of this thread is to be causal without a mask, and in how many layers it was.

    Another thread may run the same model meanwhile, whose attention goes by the same name.
    """

    asked, layers = False, 0


_causal = _Causal()


@contextlib.contextmanager
def causal_without_masks(model: Any) -> Iterator[Callable[[], int]]:
    """Attention of a model that uses "sdpa" gets no mask and is causal; nothing happens to others.

    Right for prompts without padding on the left, of which there are all keys and no others. transformers
    leaves out masks, too, but not for every cache of a fixed size, nor in every release while a CUDA graph is
    recorded, and with a mask PyTorch has no fast kernel: 2048 tokens of Qwen3-30B-A3B's heads took 204 us on
    an H200, without 81.

    Yields:
        In how many layers' calls that was so: other models' attention goes other ways.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(MASKLESS, causal_attention)
    AttentionMaskInterface.register(MASKLESS, _no_mask)
    before = _causal.asked, _causal.layers
    _causal.asked, _causal.layers = True, 0
    try:
        with _in_place_of_sdpa(model.config, MASKLESS):
            yield lambda: _causal.layers
    finally:
        _causal.asked, _causal.layers = before


def is_without_masks(config: Any) -> bool:
    """Whether a model's attention, by its config, is in `causal_without_masks` of this thread."""
    return _causal.asked and config._attn_implementation == MASKLESS


def _no_mask(
    *arguments: Any, allow_is_causal_skip: bool = True, local_size: int | None = None, **named: Any
) -> torch.Tensor | None:
    """None where transformers' mask would be causal and nothing else."""
    from transformers.masking_utils import sdpa_mask

    if _causal.asked and allow_is_causal_skip and local_size is None:
        return None
    how = {"allow_is_causal_skip": allow_is_causal_skip, "local_size": local_size, **named}
    return sdpa_mask(*arguments, **how)


def causal_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, in `causal_without_masks`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = named.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    whole = key.shape[2] == value.shape[2] == query.shape[2]
    if _causal.asked and attention_mask is None and whole and causal and not asks_for_more(named):
        _causal.layers += 1
    return sdpa_attention_forward(module, query, key, value, attention_mask, **named)


@contextlib.contextmanager
def _in_place_of_sdpa(config: Any, name: str) -> Iterator[None]:
    if config._attn_implementation != "sdpa":
        yield
        return
    before = [(each, each._attn_implementation) for each in all_of(config)]
    config._attn_implementation = name
    try:
        yield
    finally:
        for each, implementation in before:
            each._attn_implementation = implementation


def with_additive_masks(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a model, their boolean masks as what is added to scores: else every layer would make that."""
    if model.config._attn_implementation != NAME:
        return inputs
    masks = tree_map(lambda mask: additive(mask, model.dtype), inputs.get("attention_mask"))
    return {**inputs, "attention_mask": masks}


def asks_for_more(named: dict[str, Any]) -> bool:
    """Whether arguments of transformers ask for what only its own functions do."""
    asked = (named.get(name) for name in _MORE)
    return any(one is not None and one is not False for one in asked)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; by its own function where cuDNN does not take it.

    Args:
        module: the layer.
        query: [batch, heads, tokens, head_dim].
        key, value: [batch, fewer heads, keys, head_dim].
        attention_mask: [batch, 1, tokens, keys], additive or boolean, or None.
        dropout: probability.
        scaling: of the scores; None: head_dim ** -0.5.
        named: further arguments of transformers.

    Returns:
        [batch, tokens, heads, head_dim], and None in place of the weights.
    """
    if attention_mask is not None and attention_mask.dtype not in (torch.bool, query.dtype):
        attention_mask = attention_mask.to(query.dtype)
    shared = getattr(module, "num_key_value_groups", 1) > 1
    more = dropout > 0 or asks_for_more(named)
    if attention_mask is None or not shared or more or not _cudnn_takes(query, key, value, attention_mask):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        own = {"dropout": dropout, "scaling": scaling, **named}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **own)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
    return out.transpose(1, 2).contiguous(), None


def _cudnn_takes(*tensors: torch.Tensor) -> bool:
    """Whether cuDNN has a kernel for a query, keys, values and a mask."""
    query, plain = tensors[0], all(type(tensor) is torch.Tensor for tensor in tensors)
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return plain and query.device.type == "cuda" and _ask(query.device, query.dtype, shapes)


def _ask(device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Not traced by torch.compile, which calls it and takes the result for a constant."""
    return _cudnn_takes_shapes(device, dtype, *shapes)


@functools.lru_cache(maxsize=4096)
def _cudnn_takes_shapes(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> bool:
    """PyTorch's answer for tensors whose rows are in one piece."""
    cuda = torch.backends.cuda
    query, key, value, mask = (
        torch.empty(shape[-1:], dtype=dtype, device=device).expand(shape) for shape in shapes
    )
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(query, key, value, mask, 0.0, False, True))
