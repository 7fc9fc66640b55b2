"""Attention of decoding steps by cuDNN, without copies of keys and values; that of prompts, and of what a
cache lacks of them, without masks.

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
from torch.utils._pytree import tree_map

from kbit.backends.cuda.attention_rests import takes as takes_rests
from kbit.format.autocast import autocast_dtype
from kbit.integrations.transformers.additive_masks import additive, additive_mask
from kbit.nn.standing_in import standing_in

SDPA = "sdpa"  # among transformers' ways of computing attention, the one that is another here
STEPS, PROMPTS = "steps", "prompts"
RESTS, MASKED_RESTS = "rests of prompts", "rests of prompts, with masks"
# What asks transformers' own function for more than this one does.
_MORE = ("position_bias", "softcap", "cache", "output_attentions")


class MaskWantedError(Exception):
    """A model wants a mask for more than causal attention, in `causal_without_masks`."""


class _Here(threading.local):
    """What attention by "sdpa" is for in this thread, where it is ours; how many layers had no mask.

    Its functions stand in for transformers' in all threads, and the models keep the name: some look at it.
    """

    way: str | None = None
    layers = 0
    lengths: dict[torch.device, torch.Tensor] | None = None  # of caches, in front of rests of prompts


_here = _Here()


@contextlib.contextmanager
def shared_heads(way: str = STEPS) -> Iterator[None]:
    """Attention by "sdpa" runs as here in this thread.

    Args:
        way: `MASKED_RESTS`: with a mask whatever the cache holds, which only its device knows.
    """
    torch.compiler.assume_constant_result(_ask)
    torch.compiler.assume_constant_result(_way)
    with _in_place_of_sdpa(way):
        yield


@contextlib.contextmanager
def causal_without_masks() -> Iterator[Callable[[], int]]:
    """Attention by "sdpa" gets no mask and is causal in this thread.

    Right for prompts without padding on the left, of which there are all keys and no others. transformers
    leaves out masks, too, but not for every cache of a fixed size, nor in every release while a CUDA graph is
    recorded, and with a mask PyTorch has no fast kernel: 2048 tokens of Qwen3-30B-A3B's heads took 204 us on
    an H200, without 81.

    Yields:
        In how many layers' calls that was so: other models' attention goes other ways.

    Raises:
        MaskWantedError: from within, where a model wants another mask.
    """
    with _in_place_of_sdpa(PROMPTS):
        yield lambda: _here.layers


@contextlib.contextmanager
def rests_without_masks(lengths: dict[torch.device, torch.Tensor]) -> Iterator[Callable[[], int]]:
    """Attention by "sdpa" is causal behind what a cache holds, and gets no mask, in this thread.

    Args:
        lengths: how many tokens that is, int64, one number, on every device of the cache.

    Yields:
        In how many layers' calls that was so: other models' attention goes other ways.

    Raises:
        MaskWantedError: from within, where a model wants another mask, or a layer has no kernel for that.
    """
    with _in_place_of_sdpa(RESTS, lengths):
        yield lambda: _here.layers


@contextlib.contextmanager
def _in_place_of_sdpa(way: str, lengths: dict[torch.device, torch.Tensor] | None = None) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    before = _here.way, _here.layers, _here.lengths
    _here.way, _here.layers, _here.lengths = way, 0, lengths
    try:
        with standing_in(functions, SDPA, _attention), standing_in(masks, SDPA, _mask):
            yield
    finally:
        _here.way, _here.layers, _here.lengths = before


def runs_by(config: Any, way: str) -> bool:
    """Whether a model's attention, by its config, is ours in this thread, and for that."""
    return _here.way == way and config._attn_implementation == SDPA


def _way() -> str | None:
    """Not traced by torch.compile, which calls it and takes the result for a constant."""
    return _here.way


def _attention(own: Callable[..., Any]) -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if own is not sdpa_attention_forward:  # somebody's of that name
        return own
    ways = {STEPS: attention, MASKED_RESTS: attention, RESTS: rest_attention, PROMPTS: causal_attention}
    return _by_way(own, ways)


def _mask(own: Callable[..., Any]) -> Callable[..., Any]:
    return _by_way(own, {STEPS: additive_mask, MASKED_RESTS: _whole_mask, RESTS: _no_mask, PROMPTS: _no_mask})


def _by_way(own: Callable[..., Any], ways: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """A function that is one of several in threads which ask for that, and its own in others."""

    @functools.wraps(own)
    def function(*arguments: Any, **named: Any) -> Any:
        way = _way()
        return (own if way is None else ways[way])(*arguments, **named)

    return function


def _no_mask(*_: Any, allow_is_causal_skip: bool = True, local_size: int | None = None, **named: Any) -> None:
    """None where transformers' mask would be causal and nothing else."""
    if not allow_is_causal_skip or local_size is not None:
        raise MaskWantedError


def _whole_mask(*arguments: Any, **named: Any) -> torch.Tensor | None:
    return additive_mask(*arguments, **{**named, "allow_is_causal_skip": False})


def causal_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, as in `causal_without_masks`."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    whole = key.shape[2] == value.shape[2] == query.shape[2]
    if attention_mask is None and whole and _is_causal(module, named):
        _here.layers += 1
    return sdpa_attention_forward(module, query, key, value, attention_mask, **named)


def rest_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it, as in `rests_without_masks`."""
    length = (_here.lengths or {}).get(query.device)
    plain = attention_mask is None and not dropout and _is_causal(module, named)
    if length is None or not plain or not takes_rests(query, key, value):
        raise MaskWantedError
    _here.layers += 1
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.kbit.attention_rest(query, key, value, length, scaling), None


def _is_causal(module: Any, named: dict[str, Any]) -> bool:
    """Whether a layer's attention is causal and nothing more."""
    causal = named.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return bool(causal) and not asks_for_more(named)


def with_additive_masks(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Inputs of a model, their boolean masks as what is added to scores: else every layer would make that."""
    if not runs_by(model.config.get_text_config(decoder=True), STEPS):
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
    mask = additive(attention_mask, query.dtype)
    return _by_cudnn(query, key, value, mask, scaling).transpose(1, 2).contiguous(), None


def _by_cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """PyTorch's attention by cuDNN, [batch, heads, tokens, head_dim], of what `_cudnn_takes`.

    Called by its name: `sdpa_kernel`, in which `scaled_dot_product_attention` would call it, sets switches of
    the whole process. Other threads' attention has no kernel meanwhile, or for good, where two such overlap.
    """
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    made: tuple[torch.Tensor, ...] = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        query, key, value, mask, compute_log_sumexp=learns, scale=scaling
    )
    return made[0]


def _cudnn_takes(query: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether cuDNN has a kernel for a query, keys, values and a mask."""
    tensors = query, *others
    if query.device.type != "cuda" or not all(type(tensor) is torch.Tensor for tensor in tensors):
        return False
    numbers = [tensor for tensor in tensors if tensor.dtype != torch.bool]  # masks of others become additive
    if any(tensor.dtype != query.dtype or tensor.stride(-1) != 1 for tensor in numbers):
        return False
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    return tensors[-1].dim() == 4 and _ask(query.device, query.dtype, shapes)


def _ask(device: torch.device, dtype: torch.dtype, shapes: tuple[tuple[int, ...], ...]) -> bool:
    """Not traced by torch.compile, which calls it and takes the result for a constant."""
    if autocast_dtype(device) not in (None, dtype):  # PyTorch's attention is among what that casts
        return False
    switches = (
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    return _cudnn_takes_shapes(device, dtype, switches, *shapes)


@functools.lru_cache(maxsize=4096)
def _cudnn_takes_shapes(
    device: torch.device, dtype: torch.dtype, switches: tuple[bool, ...], *shapes: tuple[int, ...]
) -> bool:
    """PyTorch's answer for tensors whose rows are in one piece, where the switches that it asks are so."""
    cuda = torch.backends.cuda
    query, key, value, mask = (
        torch.empty(shape[-1:], dtype=dtype, device=device).expand(shape) for shape in shapes
    )
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(query, key, value, mask, 0.0, False, True))
