"""Models that are split over ranks: after loading, and when they are saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from kbit.format.codebook import BLOCK_SIZE
from kbit.format.names import PACKED, SCALE
from kbit.integrations.transformers import parallel
from kbit.integrations.transformers.parallel_layers import (
    ParallelEmbedding,
    ParallelExperts,
    ParallelLinear,
    ParallelModule,
    Split,
)
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear
from kbit.nn.norm import FOR_GRADIENTS
from kbit.nn.parts import QuantizedModule


def local_part(whole: torch.Tensor, reference: Any) -> torch.Tensor:
    """This rank's part of a tensor that is to become the DTensor parameter `reference`.

    Args:
        whole: all ranks' rows and columns; or already this rank's, which is passed on.
        reference: a parameter; not split if it is no DTensor.
    """
    if not isinstance(reference, DTensor) or whole.shape == reference.to_local().shape:
        return whole
    placement: Any = reference.placements[0]
    ranks, rank = reference.device_mesh.size(), reference.device_mesh.get_local_rank()
    matrices = whole.chunk(getattr(placement, "split_factor", 1), dim=placement.dim)
    # The chunks of torch.chunk, which DTensor has too: ceil(size / ranks), the last ones shorter.
    each = -(-matrices[0].shape[placement.dim] // ranks)
    index = slice(rank * each, (rank + 1) * each)
    parts = [matrix.movedim(placement.dim, 0)[index].movedim(0, placement.dim) for matrix in matrices]
    return torch.cat(parts, dim=placement.dim) if len(parts) > 1 else parts[0].contiguous()


def is_by_id(reference: Any) -> bool:
    """Whether a parameter of fused experts is split by id: every rank has all of its own experts."""
    return isinstance(reference, DTensor) and reference.placements[0].is_shard(0)


def owned(of_experts: Any, reference: Any) -> Any:
    """The entries, of a list or tensor with one per expert, of the experts that this rank holds.

    Args:
        of_experts: entries in order of the experts' ids.
        reference: a parameter of the fused experts; all entries are returned if it is not split by id.
    """
    if not is_by_id(reference):
        return of_experts
    count = reference.to_local().shape[0]
    begin = reference.device_mesh.get_local_rank() * count
    return of_experts[begin : begin + count]


def localize(model: Any) -> None:
    """Turn every split quantized layer into its parallel class, on plain local parameters.

    Args:
        model: a PreTrainedModel that transformers has split and loaded.

    Raises:
        ValueError: a layer is split so that it cannot compute what the plan says; the message names it.
    """
    known: dict[int, nn.Parameter] = {}  # tied layers go on sharing
    for name, module in model.named_modules():
        style = parallel.style_of(model, name)
        if style == parallel.SUMS_GRADIENTS and "forward" in vars(module):  # since transformers 5.21
            setattr(vars(module)["forward"], FOR_GRADIENTS, True)
        if not isinstance(module, QuantizedModule):
            continue
        weights = {weight: module._parameters[weight + PACKED] for weight in module.shapes}
        parallel.check_fits(
            model, name, module, {weight: _axis(parameter) for weight, parameter in weights.items()}
        )
        if any(isinstance(weight, DTensor) for weight in weights.values()):
            _localize(module, style, known)
        elif style in parallel.PARALLEL_FORWARDS:
            # A head tied to a table that stays whole: transformers would gather what is complete.
            module.__dict__.pop("forward", None)
    for module in model.modules():
        if isinstance(module, ParallelExperts):
            _agree_on_factors(module)


def _axis(parameter: Any) -> int | None:
    """The dimension along which a parameter is split over ranks; None if every rank has all of it."""
    if not isinstance(parameter, DTensor) or parameter.placements[0].is_replicate():
        return None
    placement: Any = parameter.placements[0]
    return int(placement.dim)


def _localize(module: Any, style: str | None, known: dict[int, nn.Parameter]) -> None:
    split = None
    for key, parameter in list(module._parameters.items()):
        if not isinstance(parameter, DTensor):
            continue
        split = split or Split(parameter.device_mesh)
        (placement,) = parameter.placements
        if not placement.is_replicate():
            split.placements[key], split.shapes[key] = placement, tuple(parameter.shape)
        if id(parameter) not in known:
            known[id(parameter)] = nn.Parameter(parameter.to_local().detach(), parameter.requires_grad)
        module._parameters[key] = known[id(parameter)]
    assert split is not None
    module.split = split
    # Not by the style's name: a head that is tied to a table is split as the table is.
    split.gathers, split.splits_input = style not in parallel.GIVES_PART, style not in parallel.TAKES_PART
    for weight, (*_, columns) in module.shapes.items():
        packed = module._parameters[weight + PACKED]
        last = split.axis(weight + PACKED) == packed.dim() - 1
        local = packed.shape[-1] // module.bits * BLOCK_SIZE if last else columns
        module.shapes[weight] = (*packed.shape[:-1], local)
    if style != "ep_dispatch_experts":  # there transformers moves tokens between ranks, and sums
        module.__dict__.pop("forward", None)
    _become_parallel(module, split)


def _become_parallel(module: Any, split: Split) -> None:
    """Change a module's class, and its sizes to those of this rank."""
    if isinstance(module, KbitExperts):
        module.__class__ = ParallelExperts
        module.num_experts, module.hidden_dim, module.intermediate_dim = module.shapes["down_proj"]
    elif isinstance(module, KbitEmbedding):
        module.__class__ = ParallelEmbedding
        module.num_embeddings, module.embedding_dim = module.shapes["weight"]
        each = -(-split.shapes["weight_packed"][0] // split.mesh.size())
        split.offset = split.mesh.get_local_rank() * each
    else:
        assert isinstance(module, KbitLinear)
        module.__class__ = ParallelLinear
        module.out_features, module.in_features = module.shapes["weight"]


def _agree_on_factors(experts: ParallelExperts) -> None:
    """Have all ranks hold factors of split experts in one form, so that saving gathers the same tensors."""
    for weight in experts.shapes:
        key = weight + SCALE
        if experts.split.axis(weight + PACKED) != 0:
            continue  # every rank has the factors of all experts
        stored = experts._parameters.get(key)
        scale = (
            torch.ones(experts.num_experts, dtype=torch.float32, device=experts._device_of(weight))
            if stored is None
            else stored
        )
        form = torch.tensor([scale.dim(), int(stored is not None)], device=scale.device)
        dist.all_reduce(form, dist.ReduceOp.MAX, group=experts.split.group)
        dimensions, stored_anywhere = form.tolist()
        if not stored_anywhere:
            continue
        if scale.dim() < dimensions:
            scale = scale[:, None].expand(-1, 2)
        experts._parameters.pop(key, None)
        experts._buffers.pop(key, None)
        experts._set_parameter(key, scale.detach().clone())
        experts.split.placements[key] = experts.split.placements[weight + PACKED]
        experts.split.shapes[key] = (experts.split.shapes[weight + PACKED][0], *scale.shape[1:])


def has_parallel_layers(model: nn.Module) -> bool:
    """Whether some quantized layer of a model is split over ranks."""
    return any(isinstance(module, ParallelModule) for module in model.modules())


def _whole(name: str, tensor: DTensor) -> torch.Tensor:
    """The tensor of all ranks, every one of which must call this."""
    placement = tensor.placements[0]
    if len(tensor.placements) > 1 or not isinstance(placement, _StridedShard):
        return tensor.full_tensor()
    ranks, size = tensor.device_mesh.size(), tensor.shape[placement.dim]
    if size % (int(placement.split_factor) * ranks):
        raise ValueError(
            f"{name} {tuple(tensor.shape)} is two matrices of {size // 2} rows, which {ranks} ranks do not "
            f"share evenly; it cannot be gathered. Save with a number of ranks that divides {size // 2}."
        )
    # A rank has its part of the gates above its part of the ups; torch 2.11 does not gather that.
    local = tensor.to_local().contiguous()
    parts = [torch.empty_like(local) for _ in range(ranks)]
    dist.all_gather(parts, local, group=tensor.device_mesh.get_group())
    pieces = [part.chunk(int(placement.split_factor), placement.dim) for part in parts]
    return torch.cat([piece for half in zip(*pieces, strict=True) for piece in half], placement.dim)


def gathered_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """A split model's state dict with whole tensors, on the CPU of rank 0; other ranks get empty ones.

    Every rank must call it. Tied parameters stay one tensor, which a checkpoint then holds once.

    Raises:
        ValueError: a tensor's parts differ in size, so that they cannot be gathered.
    """
    gathered: dict[str, torch.Tensor] = {}
    seen: dict[tuple[Any, ...], torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        key = (local.data_ptr(), tuple(tensor.shape), tensor.dtype) if local.numel() else (name,)
        if key not in seen:
            whole = _whole(name, tensor) if isinstance(tensor, DTensor) else tensor
            seen[key] = (
                whole.detach().cpu().contiguous()
                if dist.get_rank() == 0
                else whole.new_empty(0, device="cpu")
            )
        gathered[name] = seen[key]
    return gathered
