"""Decode speed of a whole model: a greedy loop with a key-value cache, the same for every model."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from kbit.integrations.transformers.cache_argument import cache_in, with_cache


@dataclass(frozen=True)
class DecodeSpeed:
    """Tokens per second of a single stream."""

    prefill_tokens_s: float
    decode_tokens_s: float
    prompt_tokens: int
    new_tokens: int


@torch.inference_mode()
def tokens_per_second(
    model: Any, input_ids: torch.Tensor, new_tokens: int = 64, repeats: int = 3, seconds: float = math.inf
) -> DecodeSpeed:
    """Decode greedily after a prompt and time both parts; the fastest of `repeats`.

    The fastest and not the median: one stream of small kernels is slowed by anything else on the machine
    and sped up by nothing.

    Args:
        model: a transformers causal language model in evaluation mode.
        input_ids: int64 [1, T], the prompt, on the model's device.
        new_tokens: tokens decoded one at a time after the first.
        repeats: how often the whole is done.
        seconds: a repetition that has decoded for so long stops before `new_tokens`.
    """
    prefill, decode = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1)
        middle = time.perf_counter()
        done = 0
        while done < new_tokens:
            token = output.logits[:, -1:].argmax(-1)
            output = model(input_ids=token, use_cache=True, **with_cache(cache_in(output)))
            done += 1
            if time.perf_counter() - middle > seconds:
                break
        end = time.perf_counter()
        prefill.append(middle - start)
        decode.append((done / (end - middle), done))
    count = input_ids.shape[1]
    decode_tokens_s, decoded = max(decode)
    return DecodeSpeed(count / min(prefill), decode_tokens_s, count, decoded)
