"""Names: how a quantized parameter's parts are called in a checkpoint, and which module a tensor belongs to.

A policy decides by module name. Mixture-of-experts models store one tensor per expert on disk
(`...mlp.experts.7.gate_proj.weight`) and hold one fused parameter in memory (`...mlp.experts.gate_up_proj`);
both belong to the experts module, `...mlp.experts`, so that one fused tensor always has one width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

PACKED = "_packed"
ABSMAX = "_absmax"
SCALE = "_scale"
PARTS = (PACKED, ABSMAX, SCALE)

# "experts" as a whole component: "shared_experts" is an ordinary MLP. What follows is an optional index and
# the projection's name, as in experts.7.gate_proj.weight, experts.7.w1.weight and experts.gate_up_proj.
_EXPERT_TENSOR = re.compile(r"^((?:.*\.)?experts)\.(?:\d+\.)?\w+(?:\.(?:weight|bias))?$")
# Only these parameters are ever replaced by parts; a plain "input_scale" or "weight_scale_inv" is no part.
_PARAMETER = r"(weight|(?:^|(?<=\.))(?:gate_up_proj|down_proj|gate_proj|up_proj))"
_PART = re.compile(f"{_PARAMETER}({'|'.join(PARTS)})$")


def original_of(tensor_name: str) -> str:
    """The parameter that a stored tensor is a part of; itself if it is no part of a quantized parameter.

    >>> original_of("lm_head.weight_packed"), original_of("mlp.experts.down_proj_absmax")
    ('lm_head.weight', 'mlp.experts.down_proj')
    """
    return _PART.sub(r"\1", tensor_name)


def module_of(tensor_name: str) -> str:
    """The module name that a policy's overrides and skip list are matched against.

    Args:
        tensor_name: dotted name of a parameter, or of a part of one, in a checkpoint or in a model.

    Returns:
        The owning module's name; for a tensor of a single expert, that of the experts module.

    >>> module_of("model.layers.0.mlp.experts.7.gate_proj.weight")
    'model.layers.0.mlp.experts'
    >>> module_of("model.layers.0.mlp.experts.gate_up_proj_packed")
    'model.layers.0.mlp.experts'
    >>> module_of("lm_head.weight")
    'lm_head'
    """
    name = original_of(tensor_name)
    expert = _EXPERT_TENSOR.match(name)
    return expert.group(1) if expert else holder_of(name)


def holder_of(parameter: str) -> str:
    """The module of a model that holds a parameter, or "" for the model itself; no tensor of a checkpoint.

    >>> holder_of("mlp.experts.gate_up_proj")
    'mlp.experts'
    """
    return parameter.rpartition(".")[0]


def all_names(name: str, names: Mapping[str, list[str]]) -> tuple[str, ...]:
    """A module's names: those in the model's checkpoints if they are others, and the model's own."""
    return (*names.get(name, ()), name)


def is_candidate(tensor_name: str, shape: Sequence[int]) -> bool:
    """Whether a checkpoint tensor is of a kind that a policy may quantize, judged by name and shape alone.

    Linear and embedding weights are 2-D and named "weight"; experts are 2-D one by one, or 3-D fused.
    Norms, biases and convolutions have another rank. Routers are candidates; the policy declines them.

    Args:
        tensor_name: name of a parameter in an unquantized checkpoint.
        shape: its shape.
    """
    if module_of(tensor_name).rpartition(".")[2] == "experts" and not tensor_name.endswith("bias"):
        return len(shape) in (2, 3)
    return len(shape) == 2 and tensor_name.rpartition(".")[2] == "weight"
