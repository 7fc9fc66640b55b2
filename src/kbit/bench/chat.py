"""`kbit bench chat`: how long turns of a chat wait for their first token, with and without prefix caching.

Models of random weights, greedy, one chat: every prompt is the one before, its answer and a message. On a GPU
steps come from CUDA graphs, and so do prompts, or what no cache holds of them, of up to 2048 tokens. A chat
is held three times, with other tokens each time, and the last one counts: kernels are compiled, steps and
prompts recorded by then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kbit.bench import model_build
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.cuda_graphs import disable_cuda_graphs, enable_cuda_graphs
from kbit.integrations.transformers.prefix_caching import disable_prefix_caching, enable_prefix_caching
from kbit.integrations.transformers.token_times import TokenTimes

WHOLE, KEPT = "whole prompts", "prefix caching"
_CHATS = 3


@dataclass(frozen=True)
class Plan:
    """A chat.

    Attributes:
        turns: prompts and answers.
        first: tokens of the first prompt, with all that stands in front of a chat.
        message: tokens of every other one.
        new_tokens: of an answer; at least two.
    """

    turns: int = 4
    first: int = 6144
    message: int = 256
    new_tokens: int = 64


@dataclass(frozen=True)
class Row:
    """A turn: `prompt` in tokens; how long the first token took, and how many a second came behind it."""

    arm: str
    way: str
    turn: int
    prompt: int
    first_token_s: float
    tokens_s: float | None


def measure(
    config: Any,
    device: torch.device,
    policies: dict[str, QuantizationPolicy | None],
    plan: Plan,
    progress: Callable[[str], None] = lambda words: None,
) -> Iterator[Row]:
    """Build every arm and hold the chat in both ways.

    Args:
        config: a transformers config.
        device: where; graphs are for GPUs.
        policies: name of an arm -> its policy; None for 16 bits.
        plan: the chat.
        progress: told what is being done.
    """
    for arm, policy in policies.items():
        with model_build.freeing(device):
            progress(f"{arm}: building")
            model = model_build.build(config, device, torch.bfloat16, policy).model
            for way in (WHOLE, KEPT):
                with _as(model, way, device):
                    for number in range(_CHATS):
                        progress(f"{arm}: {way}, chat {number + 1} of {_CHATS}")
                        rows = [Row(arm, way, *turn) for turn in _chat(model, plan, number, device)]
                yield from rows
            del model


@contextlib.contextmanager
def _as(model: Any, way: str, device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        enable_cuda_graphs(model)
    if way == KEPT:
        enable_prefix_caching(model, 1)
    try:
        yield
    finally:
        disable_prefix_caching(model)
        disable_cuda_graphs(model)


def _chat(
    model: Any, plan: Plan, seed: int, device: torch.device
) -> Iterator[tuple[int, int, float, float | None]]:
    """(Turn, tokens of its prompt, seconds to its first token, tokens a second behind it)."""
    generator = torch.Generator().manual_seed(seed)
    static = {"cache_implementation": "static"} if device.type == "cuda" else {}
    ids = torch.empty(1, 0, dtype=torch.int64)
    for turn in range(plan.turns):
        more = plan.message if turn else plan.first
        message = torch.randint(model.config.get_text_config().vocab_size, (1, more), generator=generator)
        ids = torch.cat((ids, message), 1)
        times = TokenTimes()
        ids = model.generate(
            ids.to(device),
            attention_mask=torch.ones_like(ids, device=device),
            max_new_tokens=plan.new_tokens,
            min_new_tokens=plan.new_tokens,
            do_sample=False,
            pad_token_id=0,
            streamer=times,
            **static,
        ).cpu()
        yield turn + 1, ids.shape[1] - plan.new_tokens, times.tokens[0], times.tokens_s
