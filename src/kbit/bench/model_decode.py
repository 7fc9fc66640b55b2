"""Decoding and prefill of a whole model: the same loop for every arm, one CUDA graph a step.

What a captured step of transformers' static cache has to keep out of Python, and how:
* Positions are a tensor that the graph itself advances; the cache's own count of tokens is one already, in
  full attention. Sliding windows count in Python, a replay would not advance them: they are refused.
* Masks are made from that count on the device. Only before the capture may transformers look at it: the
  prompt is read outside the graph, with a few steps, which also allocate the cache and set "there is a state"
  in linear attention, whose convolution and recurrent states are updated in place.
* Compiled layers keep transformers' linear attention, by PyTorch without flash-linear-attention and
  causal-conv1d. One token of it is a fixed chain of small kernels, all capturable; `--compile` fuses them.
* Experts: "eager" in transformers looks at the routing on the host. grouped_mm and batched_mm do not.
* Over several GPUs, the sums between them are kernels of the graph too. Communicators must exist before the
  capture, which the steps before it see to, and NCCL's watchdog asks for events from a thread of its own
  meanwhile, so that only this thread's calls may be forbidden during the capture.
* Steps run under `torch.no_grad`, as `generate`'s do: residual sums of inference tensors are not fused.
* The tokens that are fed are random. A random model soon repeats itself, and repeated tokens choose the same
  experts; the greedy choice is computed all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from kbit.backends.cuda.capture import capture
from kbit.bench.repeats import median_and_spread
from kbit.format.words import first_line
from kbit.integrations.transformers.cache_argument import with_cache
from kbit.integrations.transformers.prompts import prompt_kernels
from kbit.integrations.transformers.step_kernels import step_kernels

WARM_STEPS = 3
_LENGTHS = 64  # caches are a multiple long: attention with a mask wants aligned rows


@dataclass(frozen=True)
class Timing:
    """Median milliseconds and (max - min) / median; `reason`: why there was no graph, None if there was."""

    ms: float
    spread: float
    reason: str | None = None


def _summary(samples: list[float], reason: str | None) -> Timing:
    return Timing(*median_and_spread(samples), reason)


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """Time of a call, on the device's clock where it has one."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def _ranks() -> int:
    """Processes that run the model together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _failed_anywhere(here: bool, device: torch.device) -> bool:
    """Whether any rank failed: all must go on in the same way, or they wait for each other forever."""
    flag = torch.tensor([here], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag.item())


def _captured(run: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], str | None]:
    """A call as a CUDA graph's replay; where that cannot be, itself, and why. It must have run before."""
    if device.type != "cuda":
        return run, f"no CUDA graphs on {device.type}"
    graph, reason = torch.cuda.CUDAGraph(), None
    try:
        with capture(graph, device):
            run()
    except RuntimeError as error:
        reason = first_line(error)
    if _ranks() > 1 and _failed_anywhere(reason is not None, device):
        reason = reason or "another rank could not capture it"
    return (graph.replay, None) if reason is None else (run, reason)


def positions(prompt: int, steps: int) -> int:
    """How many a `DecodeLoop` reaches, warming up included."""
    return prompt + max(steps, WARM_STEPS)


class DecodeLoop:
    """One batch of sequences of a model: a prompt, then single tokens.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        batch: sequences.
        prompt: tokens of each before decoding.
        steps: tokens of each decoded after them, per repetition.

    Raises:
        ValueError: the model's cache has sliding windows.
    """

    def __init__(self, model: Any, batch: int, prompt: int, steps: int) -> None:
        from transformers import StaticCache

        self.model, self.prompt, self.steps = model, prompt, steps
        self.device = next(model.parameters()).device
        length = -(-positions(prompt, steps) // _LENGTHS) * _LENGTHS
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        if any(self.cache.is_sliding):
            raise ValueError(
                "a sliding window's cache counts tokens in Python, so a CUDA graph cannot replay its step. "
                "Set sliding_window to null in the config, or choose another model."
            )
        generator = torch.Generator().manual_seed(0)
        fed = torch.randint(model.config.vocab_size, (length, batch, 1), generator=generator)
        self.fed = fed.to(self.device)  # the token at each position
        self.ids = self.fed[prompt].clone()
        self.position = torch.full((1, 1), prompt, device=self.device)
        self.chosen = torch.zeros_like(self.ids)

    @torch.no_grad()
    def read_prompt(self) -> None:
        """Fill the cache, anew if it was filled before: in place, so a captured step goes on from there."""
        self.cache.reset()
        prompt = self.fed[: self.prompt, :, 0].T.contiguous()
        self.model(input_ids=prompt, use_cache=True, logits_to_keep=1, **with_cache(self.cache))

    @torch.no_grad()
    def rewind(self) -> None:
        """Count from the end of the prompt again.

        Keys of later tokens stay; masks hide them until they are replaced. States of linear attention stay
        too and go on from what was decoded, which takes as long; `read_prompt` sets them back.
        """
        self.position.fill_(self.prompt)
        self.ids.copy_(self.fed[self.prompt])
        for layer in self.cache.layers:
            count = getattr(layer, "cumulative_length", None)
            if isinstance(count, torch.Tensor):
                count.fill_(self.prompt)

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token of every sequence, and make ready for the next."""
        with step_kernels(self.model):
            output = self.model(
                input_ids=self.ids, position_ids=self.position, use_cache=True, **with_cache(self.cache)
            )
        self.chosen.copy_(output.logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)
        # The last step's next position would be behind the last token.
        following = self.position.view(1).clamp(max=len(self.fed) - 1)
        self.ids.copy_(self.fed.index_select(0, following)[0])

    def warm_up(self) -> None:
        """A few steps after the prompt, on a stream of their own as captures want it."""
        self.rewind()
        if self.device.type != "cuda":
            self.step()
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_STEPS):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()

    def captured(self) -> tuple[Callable[[], object], str | None]:
        """The step as a CUDA graph's replay; where that cannot be, itself, and why."""
        return _captured(self.step, self.device)

    def measure(self, run: Callable[[], object], repeats: int, reason: str | None) -> Timing:
        """Time of one step, the mean over `steps` of them, `repeats` times."""

        def steps() -> None:
            for _ in range(self.steps):
                run()

        samples = []
        for _ in range(repeats):
            self.rewind()
            samples.append(_milliseconds(steps, self.device) / self.steps)
        return _summary(samples, reason)


@torch.no_grad()
def prefill(model: Any, tokens: int, repeats: int) -> Timing:
    """Time of reading one prompt into an empty, growing cache and making its last token's logits.

    In a CUDA graph, or it would be the host's time, which differs by a third from run to run. A growing cache
    has its length on the host. Both kinds of models run the same kernels around their products.
    """
    from transformers import DynamicCache

    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(1))
    ids = ids.to(device)

    def run() -> None:
        cache = DynamicCache(config=model.config)
        with prompt_kernels(model):
            model(input_ids=ids, use_cache=True, logits_to_keep=1, **with_cache(cache))

    run()
    replay, reason = _captured(run, device)
    samples = [_milliseconds(replay, device) for _ in range(repeats)]
    return _summary(samples, reason)
