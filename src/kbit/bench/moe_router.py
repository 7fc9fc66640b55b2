"""Routers: transformers' own, against the same with kbit's kernels.

Those of Qwen3-30B-A3B, 8 of 128 experts, and of Qwen3-Coder-Next, 10 of 512.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.kernel_rows import BASELINE, DISPATCHED, OURS
from kbit.bench.moe import Label, MoeRow, copies_of, measured
from kbit.nn import KbitExperts
from kbit.nn.router import fuse_routers

OWN = "transformers"
# Experts, and how many of them a token takes.
SIZES = ((128, 8), (512, 10))
HIDDEN = 2048


class _Block(nn.Module):
    """A router where `fuse_routers` looks for it."""

    def __init__(self, gate: nn.Module, experts: int, hidden: int) -> None:
        super().__init__()
        self.gate = gate
        self.experts = KbitExperts(experts, hidden, 1, nn.SiLU(), device="meta")


def make_routers(
    experts: int, choices: int, device: torch.device, hidden: int = HIDDEN
) -> dict[str, list[Any]]:
    """Cold copies of a random router in bfloat16: {OWN: transformers' own, DISPATCHED: with our kernels}."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter

    sizes = {"hidden_size": hidden, "num_experts": experts, "num_experts_per_tok": choices}
    with torch.device(device):
        own = Qwen3NextTopKRouter(Qwen3NextConfig(**sizes)).to(torch.bfloat16).requires_grad_(False)
    nn.init.normal_(own.weight, std=0.02, generator=torch.Generator(device).manual_seed(0))
    ours = copy.deepcopy(own)
    fuse_routers(_Block(ours, experts, hidden))
    count = copies_of(own.weight.nbytes, own.weight.nbytes, device)
    return {
        name: [copy.deepcopy(one) for _ in range(count)] for name, one in ((OWN, own), (DISPATCHED, ours))
    }


def router_arms(routers: dict[str, list[Any]], x: torch.Tensor) -> dict[Label, Arm]:
    """The arms of so many tokens x [T, hidden]."""
    kinds = {OWN: BASELINE, DISPATCHED: OURS}
    return {
        (name, None, kinds[name], copies[0].weight.nbytes): Arm([functools.partial(one, x) for one in copies])
        for name, copies in routers.items()
    }


def router_rows(batches: Sequence[int], repeats: int, timer: Timer) -> Iterator[MoeRow]:
    """Measure both routers; yields the rows of each batch as they are done."""
    device = torch.device("cuda")
    for experts, choices in SIZES:
        routers = make_routers(experts, choices, device)
        for tokens in batches:
            x = torch.randn(tokens, HIDDEN, device=device).to(torch.bfloat16)
            arms = router_arms(routers, x)
            yield from measured(f"router, {choices} of {experts}", tokens, arms, repeats, timer)
