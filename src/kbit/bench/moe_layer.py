"""The whole layer of experts, routing included, against transformers' 16-bit implementations of it.

Qwen3-Next's 512 experts, of which every token takes 10, chosen uniformly or by Zipf's law. grouped_mm and
batched_mm are the implementations that a CUDA graph can record.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kbit.bench.correctness import require_close
from kbit.bench.gpu_timing import Arm, Timer
from kbit.bench.kernel_rows import BASELINE, DISPATCHED, OURS
from kbit.bench.moe import GROUPED, Label, MoeRow, copies_of, measured
from kbit.bench.routings import ROUTINGS, chosen_experts
from kbit.format.policy import QuantizationPolicy
from kbit.nn import KbitExperts

BATCHED = "batched_mm"
# Beyond, copying the weights of every token's experts, as batched_mm does, is not what anybody would run.
BATCHED_MM_TOKENS = 4


@dataclass(frozen=True)
class LayerSize:
    """Sizes of a layer of experts; the default is Qwen3-Next's."""

    experts: int = 512
    chosen: int = 10
    hidden: int = 2048
    width: int = 512


@dataclass
class Layers:
    """Cold copies of one layer: transformers' experts in bfloat16, and ours."""

    dense: list[Any]
    ours: dict[int, list[KbitExperts]]


def make_layers(size: LayerSize, fewest_tokens: int, bits: Sequence[int], device: torch.device) -> Layers:
    """A random layer in as many copies as stay cold even where so few tokens choose."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

    sizes = {"hidden_size": size.hidden, "moe_intermediate_size": size.width, "num_experts": size.experts}
    torch.manual_seed(0)
    with torch.device(device):
        source = Qwen3NextExperts(Qwen3NextConfig(**sizes)).to(torch.bfloat16)
    for weight in source.parameters():
        torch.nn.init.normal_(weight.requires_grad_(False), std=0.02)
    share = min(1.0, fewest_tokens * size.chosen / size.experts)
    ours = {}
    for width in bits:
        layer = KbitExperts.from_experts(source, width, QuantizationPolicy(bits=width, search=False))
        nbytes = sum(parameter.nbytes for parameter in layer.parameters())
        count = copies_of(nbytes, int(share * nbytes), device)
        ours[width] = [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]
    nbytes = sum(parameter.nbytes for parameter in source.parameters())
    count = copies_of(nbytes, int(share * nbytes), device)
    return Layers([source, *(copy.deepcopy(source) for _ in range(count - 1))], ours)


@dataclass(frozen=True)
class Routed:
    """What a layer is called with."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def route(routing: str, tokens: int, size: LayerSize, device: torch.device) -> Routed:
    """Random tokens and the experts that they choose.

    Args:
        routing: one of ROUTINGS.
        tokens: how many.
        size: of the layer.
        device: where.

    Raises:
        ValueError: another routing.
    """
    if routing not in ROUTINGS:
        raise ValueError(f"bench moe: unknown routing {routing}; known: {', '.join(ROUTINGS)}.")
    generator = torch.Generator().manual_seed(tokens)
    ids = chosen_experts(routing, tokens, size.experts, size.chosen, generator, generator)
    weights = torch.rand(tokens, size.chosen, generator=generator)
    x = torch.randn(tokens, size.hidden, generator=generator)
    weights = weights / weights.sum(-1, keepdim=True)
    return Routed(x.to(device, torch.bfloat16), ids.to(device), weights.to(device, torch.bfloat16))


def recordable(tokens: int) -> list[str]:
    """transformers' implementations of experts that a CUDA graph can record and that suit so many tokens."""
    return [GROUPED, BATCHED] if tokens <= BATCHED_MM_TOKENS else [GROUPED]


def layer_arms(layers: Layers, routed: Routed) -> dict[Label, Arm]:
    """The arms of one batch."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    arguments = (routed.x, routed.ids, routed.weights)
    used = routed.ids.unique().numel()
    source = layers.dense[0]
    read = used * sum(parameter.nbytes for parameter in source.parameters()) // source.num_experts
    arms: dict[Label, Arm] = {}
    for way in recordable(len(routed.x)):
        forward: Callable[..., torch.Tensor] = ALL_EXPERTS_FUNCTIONS[way]
        calls = [functools.partial(forward, experts, *arguments) for experts in layers.dense]
        arms[way, None, BASELINE, read] = Arm(calls)
    for bits, copies in layers.ours.items():
        read = used * sum(parameter.nbytes for parameter in copies[0].parameters()) // source.num_experts
        arms[DISPATCHED, bits, OURS, read] = Arm([functools.partial(one, *arguments) for one in copies])
    return arms


@torch.no_grad()
def check_layer(layer: KbitExperts, routed: Routed, tokens: int = 4) -> None:
    """Compare a layer's answer for a few tokens with float32 arithmetic, expert by expert.

    Raises:
        ValueError: it computes something else.
    """
    gate_up, down = (layer.dequantize(name, routed.x.dtype) for name in layer.shapes)
    expected = torch.zeros_like(routed.x[:tokens], dtype=torch.float32)
    for token in range(len(expected)):
        for expert, weight in zip(routed.ids[token].tolist(), routed.weights[token].float(), strict=True):
            gate, up = F.linear(routed.x[token].float(), gate_up[expert].float()).chunk(2)
            expected[token] += weight * F.linear(F.silu(gate) * up, down[expert].float())
    found = layer(routed.x, routed.ids, routed.weights)[:tokens]
    what = f"bench moe: layer of {layer.num_experts} experts, k={layer.bits}, {len(routed.x)} tokens"
    require_close(what, found, expected)


def layer_rows(
    batches: Sequence[int], routings: Sequence[str], bits: Sequence[int], repeats: int, timer: Timer
) -> Iterator[MoeRow]:
    """Measure the whole layer; yields the rows of each batch as they are done."""
    device, size = torch.device("cuda"), LayerSize()
    layers = make_layers(size, min(batches), bits, device)
    for routing in routings:
        for tokens in batches:
            routed = route(routing, tokens, size, device)
            for copies in layers.ours.values():
                check_layer(copies[0], routed)
            yield from measured(f"layer, {routing}", tokens, layer_arms(layers, routed), repeats, timer)
