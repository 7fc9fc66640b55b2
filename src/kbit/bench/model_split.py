"""Models of random weights, split over the ranks of torch.distributed as transformers splits a checkpoint.

transformers decides what is split how, on the meta device. Every rank then makes each block whole, from the
same random numbers as `kbit.bench.model_build`, and keeps its part: the weights of any number of ranks are
those of one.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from kbit.bench import model_build
from kbit.bench.ports import free_port
from kbit.format.names import ABSMAX, PACKED, SCALE
from kbit.format.policy import QuantizationPolicy
from kbit.nn.parts import QuantizedModule
from kbit.nn.together import run_together

# Unless the user says otherwise. NVLink multicast has nothing to give to a few GPUs, and not every virtual
# machine that has NVLink can do it.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def rank_environment(ranks: int) -> list[dict[str, str]]:
    """Environment variables of the ranks of one machine, as torchrun sets them."""
    common = ENVIRONMENT | dict(os.environ) | {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def distributed_config(by_expert: bool) -> Any:
    """transformers' settings for tensor parallelism over all ranks.

    Args:
        by_expert: split experts by id, not every expert.
    """
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    if not by_expert:
        return DistributedConfig(tp_size=ranks, tp_plan="auto")
    if "ep_size" in DistributedConfig.__dataclass_fields__:  # since transformers 5.21
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def build(
    config: Any,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    policy: QuantizationPolicy | None = None,
    by_expert: bool = False,
) -> model_build.Built:
    """This rank's part of a model of random weights; every rank must call it.

    Args:
        config: a transformers config of a causal language model.
        device: this rank's.
        dtype: of what is not quantized.
        policy: what is quantized; None leaves all in `dtype`.
        by_expert: split experts by id.

    Returns:
        The model, and the bytes of this rank's part of it.

    Raises:
        ValueError: a layer cannot be split over so many ranks; the message names it.
    """
    from kbit.integrations.transformers import sharded

    model = _split_on_meta(config, dtype, policy, by_expert)
    model_build.start(device)
    whole = model_build.on_meta(config, dtype)
    for name, block in model_build.blocks(whole, device, policy):
        whole.set_submodule(name, nn.Identity())
        _take(model.get_submodule(name), block)
        del block
    sharded.localize(model)
    for module in model.modules():
        if isinstance(module, QuantizedModule):
            module.freeze_parts()
            module.reset_constants(module.codebook)  # factors of 1, of this rank's experts
            module.prepare()
        module._backward_hooks.clear()  # for training alone, and torch.compile cannot trace them
    model.requires_grad_(False)
    if policy is not None:
        run_together(model)  # as after loading; blocks, quantized one by one, gave their parts away
    return model_build.finished(model, device)


def _split_on_meta(
    config: Any, dtype: torch.dtype, policy: QuantizationPolicy | None, by_expert: bool
) -> Any:
    """The model as transformers' loader has it before it reads: quantized layers, their parts as DTensors."""
    from transformers import PreTrainedModel

    settings, _, mesh = PreTrainedModel.prepare_distribute_model(distributed_config(by_expert))
    config.distributed_config = settings
    model = model_build.on_meta(config, dtype)
    if policy is not None:
        from kbit.integrations.transformers.quantizer import KbitHfQuantizer

        quantizer = KbitHfQuantizer(policy, pre_quantized=False)
        quantizer._process_model_before_weight_loading(model)
    return type(model).maybe_distribute_model(model, settings, mesh)


def _take(target: nn.Module, block: nn.Module) -> None:
    """Set the tensors of a module on the meta device to this rank's parts of a whole one's."""
    owners = dict(block.named_modules())
    for path, module in list(target.named_modules()):
        owner = owners[path]
        if isinstance(module, QuantizedModule):
            _take_parts(module, owner)
        for key, reference in list(module._parameters.items()):
            if reference is not None and reference.is_meta:
                module._parameters[key] = _part(owner._parameters[key], reference)
        for key, buffer in list(module._buffers.items()):
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = owner._buffers[key]


def _take_parts(module: QuantizedModule, owner: Any) -> None:
    from kbit.integrations.transformers import sharded

    owner.restore()
    for weight in module.shapes:
        module._parameters.pop(weight, None)  # what the loader would look for
        for key in (weight + PACKED, weight + ABSMAX):
            module._parameters[key] = _part(getattr(owner, key), module._parameters[key])
        scale = getattr(owner, weight + SCALE)
        if scale.dim():  # one for each expert
            scale = sharded.owned(scale, module._parameters[weight + PACKED])
        module.set_scale(weight, scale)
    module.codebook = owner.codebook


def _part(tensor: Any, reference: Any) -> nn.Parameter:
    """This rank's part, as a DTensor where `reference` is one."""
    from kbit.integrations.transformers import sharded

    local = sharded.local_part(tensor.detach(), reference)
    if isinstance(reference, DTensor):
        shape: dict[str, Any] = {"shape": reference.shape, "stride": reference.stride()}
        local = DTensor.from_local(
            local, reference.device_mesh, reference.placements, run_check=False, **shape
        )
    return nn.Parameter(local, requires_grad=False)
