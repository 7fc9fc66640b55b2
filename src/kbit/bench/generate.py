"""`kbit bench generate`: what callers of `model.generate` get, kernel by kernel and from CUDA graphs.

Models of random weights, greedy, one sequence, every token handed to the host as in a chat. Each way is
called three times and the last call counts: kernels are compiled, steps and prompts recorded by then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kbit.bench import model_build
from kbit.format.policy import QuantizationPolicy
from kbit.integrations.transformers.cuda_graphs import (
    CUDAGraphWarning,
    disable_cuda_graphs,
    enable_cuda_graphs,
)
from kbit.integrations.transformers.token_times import TokenTimes

EAGER, GRAPHS, COMPILED = "kernel by kernel", "CUDA graphs", "CUDA graphs, compiled layers"


@dataclass(frozen=True)
class Row:
    """One way of generating with one arm.

    `first_call_s` is the whole first call with all that happens once; of the last, `first_token_s` is how
    long the first token took and `tokens_s` how many a second came after it (median). `reason`: why there was
    no CUDA graph where there should have been one.
    """

    arm: str
    way: str
    first_call_s: float
    first_token_s: float
    tokens_s: float | None
    reason: str | None = None


def measure(
    config: Any,
    device: torch.device,
    policies: dict[str, QuantizationPolicy | None],
    prompt: int,
    new_tokens: int,
    compiled: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Iterator[Row]:
    """Build every arm and generate in every way.

    Args:
        config: a transformers config.
        device: where; graphs are for GPUs.
        policies: name of an arm -> its policy; None for 16 bits.
        prompt: its tokens.
        new_tokens: of an answer; at least two.
        compiled: with torch.compile of every layer, too.
        progress: told what is being done.
    """
    ways = [EAGER]
    if device.type == "cuda":
        ways += [GRAPHS, COMPILED] if compiled else [GRAPHS]
    for arm, policy in policies.items():
        with model_build.freeing(device):
            progress(f"{arm}: building")
            model = model_build.build(config, device, torch.bfloat16, policy).model
            ids = torch.randint(config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
            for way in ways:
                progress(f"{arm}: {way}")
                yield _measure(model, ids.to(device), new_tokens, arm, way)
            del model


def _measure(model: Any, ids: torch.Tensor, new_tokens: int, arm: str, way: str) -> Row:
    static = {} if way == EAGER else {"cache_implementation": "static"}
    if static:
        enable_cuda_graphs(model, compile_layers=way == COMPILED)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", CUDAGraphWarning)
            first, _, last = (_generate(model, ids, new_tokens, static) for _ in range(3))
    finally:
        disable_cuda_graphs(model)
        if way == COMPILED:
            torch._dynamo.reset()
    reasons = [str(one.message) for one in caught if issubclass(one.category, CUDAGraphWarning)]
    return Row(arm, way, first.tokens[-1], last.tokens[0], last.tokens_s, next(iter(reasons), None))


def _generate(model: Any, ids: torch.Tensor, new_tokens: int, static: dict[str, str]) -> TokenTimes:
    times = TokenTimes()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=times,
        **static,
    )
    return times
