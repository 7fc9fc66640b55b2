"""Quantized layers of which every rank holds a part: what they compute, and the collectives between ranks.

A parallel layer is its ordinary class on local tensors, so kernels, tiles and checks are the same. Gradients
follow Megatron's pairs: an identity whose backward sums over ranks before a column split, and a sum whose
backward is an identity after a row split (Shoeybi et al. 2019, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from kbit.format import type_checks
from kbit.format.codebook import BLOCK_SIZE
from kbit.format.names import PACKED
from kbit.integrations.transformers import collectives
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.ops import checks, places


@dataclass
class Split:
    """How one layer is split over the ranks of a mesh.

    Attributes:
        mesh: one-dimensional device mesh.
        placements: {parameter, such as "weight_packed" or "bias": its placement}, of split ones only.
        shapes: {parameter: its shape over all ranks}.
        gathers: a column split whose output is wanted whole on every rank.
        splits_input: a row split whose input comes whole.
        offset: first row of the table that this rank holds (embeddings).
    """

    mesh: Any
    placements: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    gathers: bool = False
    splits_input: bool = False
    offset: int = 0

    @property
    def group(self) -> Any:
        """The process group of the ranks."""
        return self.mesh.get_group()

    def axis(self, parameter: str) -> int | None:
        """The dimension along which a parameter is split, or None."""
        placement = self.placements.get(parameter)
        return None if placement is None else int(placement.dim)


class _SumGradients(torch.autograd.Function):
    """Identity; the gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        # A copy: what autograd hands in may be used elsewhere.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    """Sum over ranks, in place; the gradient is passed on. Training sums are large: the group's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Put the ranks' columns beside each other; the gradient is cut to this rank's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, width: int, group: Any) -> torch.Tensor:
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        # Ranks hold ceil(width / ranks) columns, the last ones fewer; collectives want equal sizes.
        each = -(-width // ranks)
        ctx.begin, ctx.columns = rank * each, x.shape[-1]
        sent = torch.nn.functional.pad(x, (0, each - x.shape[-1])) if x.shape[-1] < each else x
        return collectives.gather(sent, group)[..., :width].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0].narrow(-1, ctx.begin, ctx.columns), None, None


def sum_gradients(x: torch.Tensor, group: Any) -> torch.Tensor:
    """`x`, whose gradient will be summed over ranks."""
    return _SumGradients.apply(x, group) if torch.is_grad_enabled() and x.requires_grad else x


def sum_over_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum of the ranks' `x`, which may be written over."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Sum.apply(x, group)
    return collectives.all_reduce(x, group)


def gather_columns(x: torch.Tensor, width: int, group: Any) -> torch.Tensor:
    """[..., local] of every rank -> [..., width]."""
    return _Gather.apply(x, width, group)


class ParallelModule(QuantizedModule):
    """Base of the parallel layers: their state dict holds DTensors, so that saving gathers them."""

    split: Split

    def whole_shape(self, weight: str) -> tuple[int, ...]:
        """The shape of a weight over all ranks."""
        shape = self.split.shapes.get(weight + PACKED)
        if shape is None:
            return self.shapes[weight]
        last = self.split.axis(weight + PACKED) == len(shape) - 1
        columns = shape[-1] // self.bits * BLOCK_SIZE if last else self.shapes[weight][-1]
        return (*shape[:-1], columns)

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, placement in self.split.placements.items():
            local = destination.get(prefix + name)
            if local is not None:
                destination[prefix + name] = self._as_dtensor(local, placement, self.split.shapes[name])

    def _as_dtensor(self, local: torch.Tensor, placement: Any, shape: tuple[int, ...]) -> DTensor:
        whole = torch.empty(shape, device="meta")
        settings: dict[str, Any] = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(local.detach(), self.split.mesh, [placement], **settings)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        for name in self.split.placements:
            value = state_dict.get(prefix + name)
            if isinstance(value, DTensor):
                state_dict[prefix + name] = value.to_local()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ParallelLinear(ParallelModule, KbitLinear):
    """A KbitLinear split by columns of its output, or by its rows' in-features.

    `in_features` and `out_features` are those of this rank.
    """

    @property
    def local_part(self) -> str:
        """See `KbitLinear.local_part`."""
        if self.split.axis("weight_packed") == 0:
            return "other" if self.split.gathers else "rows"
        return "other" if self.split.splits_input else "columns"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Like KbitLinear's; by rows, the ranks' partial results are rounded to x's dtype, then summed."""
        x, group = input, self.split.group
        if self.split.axis("weight_packed") == 0:
            y = super().forward(sum_gradients(x, group))
            columns = self.split.shapes["weight_packed"][0]
            return gather_columns(y, columns, group) if self.split.gathers else y
        if self.split.splits_input:
            begin = self.split.mesh.get_local_rank() * self.in_features
            x = sum_gradients(x, group).narrow(-1, begin, self.in_features)
        type_checks.tensor("linear", "x", x, self.layer_name)
        y = sum_over_ranks(self.product(x, None), group)  # the bias once, after the sum
        return y if self.bias is None else y + self.bias.to(y.dtype)


class ParallelEmbedding(ParallelModule, KbitEmbedding):
    """A KbitEmbedding split by ids, or by columns; the rows come out whole on every rank."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Like KbitEmbedding's, bit for bit: each row is one rank's, the others add zeros.

        Raises:
            IndexError: an id is out of range of all ranks' rows (on the CPU).
            TypeError, ValueError: ids are no integers, or elsewhere; the message names this layer.
        """
        if self.split.axis("weight_packed") == 1:
            columns = self.embedding_dim * self.split.mesh.size()
            return gather_columns(super().forward(input), columns, self.split.group)
        checks.embedding_ids(input, self.weight_packed.device, self.layer_name)
        self._check_range(input)
        local = input - self.split.offset
        mine = (local >= 0) & (local < self.num_embeddings)
        rows = super().forward(local.where(mine, 0))
        return sum_over_ranks(rows.masked_fill(~mine.unsqueeze(-1), 0), self.split.group)

    def _check_range(self, ids: torch.Tensor) -> None:
        """Refuse ids that no rank has: each would leave them to the others. A GPU would have to wait."""
        if ids.device.type != "cpu" or torch.compiler.is_compiling():
            return
        rows = self.split.shapes["weight_packed"][0]
        outside = ((ids < 0) | (ids >= rows)).flatten()
        if outside.any():
            position = int(outside.int().argmax())
            found = f"id {int(ids.flatten()[position])} at position {position}"
            raise places.looked_up(
                IndexError(f"embedding: {found} is outside 0..{rows - 1}"), self.layer_name
            )


class ParallelExperts(ParallelModule, KbitExperts):
    """KbitExperts split by their intermediate features, or by expert id."""

    @property
    def local_part(self) -> str:
        """See `KbitExperts.local_part`."""
        return "other" if self.split.axis("gate_up_proj_packed") == 0 else "features"

    def summed(self, y: torch.Tensor) -> torch.Tensor:
        """See `KbitExperts.summed`."""
        return sum_over_ranks(y, self.split.group)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Like KbitExperts'; every rank adds what its part gives."""
        group = self.split.group
        hidden_states = sum_gradients(hidden_states, group)
        if self.split.axis("gate_up_proj_packed") != 0:
            # Split by id, the router has summed these gradients already: each weight is one rank's.
            top_k_weights = sum_gradients(top_k_weights, group)
        return self.summed(super().forward(hidden_states, top_k_index, top_k_weights))
