"""Masks of attention as what is added to scores; that of a step by one kernel, `kbit::causal_mask`.

transformers makes a mask of booleans by a dozen small operators, and for each layer that is given one PyTorch
would make another of numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from kbit.nn.standing_in import trial
from kbit.ops import checks

# What transformers asks for in a plain mask of causal attention; all else has to be what it is without.
_ASKED = {"allow_is_causal_skip", "attention_mask", "batch_size", "kv_length", "mask_function", "q_length"}
_PLAIN = {"allow_is_bidirectional_skip": False, "kv_offset": 0, "local_size": None, "use_vmap": False}
_OTHERS = {"config", "device", "q_offset"}
_TRIED = 2, 1, 5  # batch, tokens, keys


def additive(mask: Any, dtype: torch.dtype) -> Any:
    """0 where a mask of attention is true, else -inf. Others, such as those of tokens, stay as they are."""
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool or mask.dim() != 4:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def additive_mask(*arguments: Any, dtype: torch.dtype = torch.float32, **named: Any) -> torch.Tensor | None:
    """transformers' mask of "sdpa", but additive."""
    from transformers.masking_utils import sdpa_mask

    if not arguments and dtype in checks.FLOAT_DTYPES and _is_causal(named) and _is_known(sdpa_mask):
        sizes = named["batch_size"], named["q_length"], named["kv_length"]
        return torch.ops.kbit.causal_mask(named["q_offset"], named["attention_mask"], *sizes, dtype)
    return additive(sdpa_mask(*arguments, dtype=dtype, **named), dtype)


def _is_causal(named: dict[str, Any]) -> bool:
    """Whether a mask is causal, of a cache of a fixed size, whose length is a tensor, and nothing more."""
    from transformers.masking_utils import causal_mask_function

    if torch.compiler.is_compiling() or not named.keys() >= _ASKED:
        return False
    more = named.keys() - _ASKED - _OTHERS
    if not more <= _PLAIN.keys() or any(named[name] != _PLAIN[name] for name in more):
        return False
    if named["mask_function"] is not causal_mask_function or named["allow_is_causal_skip"]:
        return False
    first, there = named.get("q_offset"), named["attention_mask"]
    if type(first) is not torch.Tensor or first.dtype != torch.int64 or first.numel() != 1:
        return False
    if there is None:
        return True
    fits = type(there) is torch.Tensor and there.dtype == torch.bool and there.dim() == 2
    return fits and len(there) == named["batch_size"] and there.device == first.device


@functools.cache
@trial
def _is_known(own: Callable[..., Any]) -> bool:
    """Whether transformers' mask is then that of `kbit::causal_mask`; a release may change it."""
    from transformers.masking_utils import causal_mask_function

    batch, tokens, keys = _TRIED
    there = torch.tensor([[True, False, True, True], [True] * 4], device="cpu")
    given = {
        "batch_size": batch,
        "q_length": tokens,
        "kv_length": keys,
        "q_offset": torch.tensor(2, device="cpu"),
        "kv_offset": 0,
        "mask_function": causal_mask_function,
        "allow_is_causal_skip": False,
        "device": torch.device("cpu"),
    }
    for mask in (None, there):
        have = torch.ops.kbit.causal_mask(given["q_offset"], mask, *_TRIED, torch.float32)
        if not torch.equal(own(attention_mask=mask, **given), have == 0):
            return False
    return True
