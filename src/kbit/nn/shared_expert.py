"""A shared expert as one more of the routed ones: a layer of experts in two launches of products for all.

An expert that all tokens take is an MLP of its own in transformers, beside the experts, often of their size.
Then its tiles follow theirs in memory (`kbit.format.adjacent`), the router chooses it for every token, with
the sigmoid of its gate or 1 as its weight, and `kbit::experts_with_shared` multiplies. Of the few tokens of
decoding that saves a layer four launches of ten, of a prompt the passes that weight and add what it gives.
Where every expert has many tokens, the block's own forward is faster: a product of all tokens alone has
larger tiles, and needs no sorted copy of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from kbit.format.layout import TILE_ROWS
from kbit.nn.experts import KbitExperts
from kbit.nn.linear import KbitLinear
from kbit.nn.merged import MergedMLP, takes
from kbit.nn.mixins import Joining, MixedIn, mix_in, stand_in
from kbit.nn.router import FusedRouter, SharedGate
from kbit.nn.standing_in import trial
from kbit.nn.support import has_own_forward, is_apart, is_silu
from kbit.nn.tiling import make_neighbours

# Tokens of a routed expert, evenly dealt, up to which one product of all is faster. On an H100, 6 layers of
# Qwen3-Coder-Next take 6.72 ms for 2048 tokens (40 an expert), with the shared one apart 6.87, and 2.68 and
# 2.73 for 128; of GLM-4.7-Flash 2.31 and 2.36 for 512 (32 an expert), 6.35 and 5.73 for 2048 (128 an expert).
_MOST_ROWS = 64
# What blocks of transformers call a shared expert, and its gate where it has one.
_SHARED = (("shared_expert", "shared_expert_gate"), ("shared_experts", None))
# What of gate, up and down goes with what of the experts. Split alike, both need one sum over ranks.
_PARTS = {"all": ("all",) * 3, "features": ("rows", "rows", "columns")}


class _Parts(NamedTuple):
    """What a block consists of.

    Attributes:
        router: chooses experts.
        experts: the routed ones.
        mlp: the shared one.
        shared_gate: gives its weight; None if that is 1.
    """

    router: FusedRouter
    experts: KbitExperts
    mlp: MergedMLP
    shared_gate: SharedGate | None

    def layers(self) -> list[Any]:
        """The shared expert's gate, up and down."""
        return [self.mlp._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj")]


def _parts(block: nn.Module) -> _Parts | None:
    """The parts of a block, or None if it is none or has others."""
    router, experts = block._modules.get("gate"), block._modules.get("experts")
    if not isinstance(experts, KbitExperts) or not isinstance(router, FusedRouter):
        return None
    if isinstance(router, SharedGate):  # a linear layer with one output, in the router's place
        return None
    for name, gate_name in _SHARED:
        mlp, gate = block._modules.get(name), block._modules.get(gate_name or "")
        if isinstance(mlp, MergedMLP) and (isinstance(gate, SharedGate) or gate_name is None):
            return _Parts(router, experts, mlp, gate if isinstance(gate, SharedGate) else None)
    return None


def router_of(block: nn.Module) -> tuple[FusedRouter, torch.Tensor | None] | None:
    """The router that a block calls, and the row that `MergedExperts` adds to its weight, or None.

    None also where somebody listens to the block, who may change weights before they are used.
    """
    if is_apart(block):
        return None
    parts = _parts(block) if isinstance(block, MergedExperts) and block.factors is not None else None
    if parts is not None:
        return parts.router, None if parts.shared_gate is None else parts.shared_gate.weight
    router = block._modules.get("gate")
    if not isinstance(router, FusedRouter) or isinstance(router, SharedGate):
        return None
    return router, None


def _are_plain(parts: _Parts) -> bool:
    """Whether all is as `experts_with_shared` takes it: tiles, factors of 1, and nobody who listens."""
    experts, layers = parts.experts, parts.layers()
    listening = (parts.router, experts, parts.mlp, *layers, parts.shared_gate)
    for module in listening:
        if module is not None and is_apart(module):
            return False
    wanted = _PARTS.get(experts.local_part)
    if wanted is None or not is_silu(parts.mlp.act_fn) or not is_silu(experts.act_fn):
        return False
    for layer, part in zip(layers, wanted, strict=True):
        plain = isinstance(layer, KbitLinear) and layer.bias is None and "weight_scale" in layer._buffers
        if not plain or layer.local_part != part or layer._held("weight") is None:
            return False
    for name in ("gate_up_proj", "down_proj"):
        if experts._held(name) is None or f"{name}_scale" not in experts._buffers:
            return False
    return not experts._is_expert_parallel


def _tiles(parts: _Parts) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tiles of experts, gate and up, and those of experts and down, of parts that are plain."""
    gate_up, down = (parts.experts._held(name) for name in ("gate_up_proj", "down_proj"))
    assert gate_up is not None
    assert down is not None
    layers = [layer.weight for layer in parts.layers()]
    return [gate_up, *layers[:2]], [down, layers[2]]


class MergedExperts(Joining):
    """A block of a router, experts and a shared one."""

    prefix = "Merged"

    factors: torch.Tensor | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As its own class."""
        parts = _parts(self) if len(args) == 1 and not kwargs else None
        if parts is None or not self._takes(parts, args[0]):
            return super().forward(*args, **kwargs)
        (hidden_states,), (router, experts, _, shared_gate) = args, parts
        x = hidden_states.reshape(-1, experts.hidden_dim)
        if shared_gate is None:
            _, weights, ids = router.route(x, shared="one")
        else:
            _, weights, ids = router.route(x, last=shared_gate.weight, shared="sigmoid")
        weight = (*_tiles(parts), experts.codebook, self.factors)
        y = torch.ops.kbit.experts_with_shared(x, *weight, ids, weights, experts.intermediate_dim)
        return experts.summed(y).view(hidden_states.shape)

    def _takes(self, parts: _Parts, x: torch.Tensor) -> bool:
        experts, layers = parts.experts, parts.layers()
        if self.factors is None or not _are_plain(parts):
            return False
        if not takes(x, layers[0].in_features, layers[0].weight.device):
            return False
        if any(layer.codebook is not experts.codebook for layer in layers):
            return False  # since `join` a weight was replaced
        gates = [gate for gate in (parts.router, parts.shared_gate) if gate is not None]
        if not all(gate.takes(x) for gate in gates) or len({gate.weight.dtype for gate in gates}) > 1:
            return False
        return 0 < x.shape[:-1].numel() * parts.router.top_k <= _MOST_ROWS * experts.num_experts

    def join(self) -> None:
        """Have the shared expert's tiles follow those of the routed, and give all one codebook."""
        parts = _parts(self)
        if parts is None or not _are_plain(parts):
            return
        experts, layers = parts.experts, parts.layers()
        hidden, intermediate = experts.hidden_dim, experts.intermediate_dim
        sizes = [(layer.out_features, layer.in_features) for layer in layers]
        fits = (
            sizes == [(intermediate, hidden)] * 2 + [(hidden, intermediate)] and not intermediate % TILE_ROWS
        )
        devices = {module.codebook.device for module in (experts, *layers)}
        if not fits or any(layer.levels != experts.levels for layer in layers) or len(devices) > 1:
            return
        moved = [make_neighbours(tiles) for tiles in _tiles(parts)]
        if any(moved) and experts.codebook.is_cuda:
            torch.cuda.empty_cache()  # where experts were is too little for those of another layer
        for layer in layers:
            layer.codebook = experts.codebook
        ones = torch.ones(experts.num_experts + 1, dtype=torch.float32, device=experts.codebook.device)
        held = self.factors
        if held is None or (held.shape, held.dtype, held.device) != (ones.shape, ones.dtype, ones.device):
            self.factors = ones
        else:
            held.copy_(ones)  # a CUDA graph may have recorded its address

    def leave(self) -> None:
        """See the base class."""
        del self.factors


def merge_shared_experts(model: nn.Module) -> None:
    """Have shared experts run with the routed ones from now on, in place, where they are in tiles."""
    for block in model.modules():
        if isinstance(block, MixedIn) or has_own_forward(block):
            continue
        parts = _parts(block)
        if parts is not None and is_silu(parts.experts.act_fn) and _adds(block, parts):
            mix_in(block, MergedExperts)
            assert isinstance(block, MergedExperts)
            block.register_buffer("factors", None, persistent=False)
            block.join()


class _Router(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = x.reshape(-1, x.shape[-1])
        return x, x[:, :2].abs(), torch.arange(2 * len(x), device=x.device).view(-1, 2)


class _Experts(nn.Module):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x * weights.sum(-1, keepdim=True) + ids.sum(-1, keepdim=True)


class _Shared(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos()


class _Gate(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True)


@trial
def _adds(block: nn.Module, parts: _Parts) -> bool:
    """Whether a block's class adds a shared expert to the routed ones; tried on parts that are known."""
    known = {parts.router: _Router(), parts.experts: _Experts(), parts.mlp: _Shared()}
    if parts.shared_gate is not None:
        known[parts.shared_gate] = _Gate()
    if set(block._modules.values()) != set(known):
        return False
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, generator=generator, device="cpu", dtype=torch.float32)
    _, weights, ids = known[parts.router](x)
    shared = known[parts.mlp](x) * (1.0 if parts.shared_gate is None else _Gate()(x).sigmoid())
    expected = known[parts.experts](x.view(-1, 8), ids, weights).view(x.shape) + shared
    for training in (False, True):
        made = stand_in(block)
        made.training = training
        made._modules = {name: known[part] for name, part in block._modules.items() if part is not None}
        y = type(block).forward(made, x)
        if not isinstance(y, torch.Tensor) or y.shape != x.shape or not torch.allclose(y, expected):
            return False
    return True
