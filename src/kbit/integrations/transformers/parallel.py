"""Tensor and expert parallelism: the parts of quantized weights in transformers' parallel plans.

transformers splits a model between its construction and its loading: every parameter that a plan names
becomes a DTensor on the meta device, and each rank reads only its part of the checkpoint. `plan_parts` adds
the parts of quantized weights to the plans. Rows of codes and of block scales split alike, and so do columns
at multiples of 32. After loading, `sharded.localize` makes plain local parameters of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from kbit.format.codebook import BLOCK_SIZE
from kbit.format.names import ABSMAX, PACKED, original_of
from kbit.format.words import counted
from kbit.nn import KbitEmbedding, KbitExperts
from kbit.nn.parts import QuantizedModule

try:  # since transformers 5.21
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard
except ImportError:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, replace_layer_number_by_wildcard

PREFIX = "kbit_"

# By transformers' style: the dimension, counted in a matrix [N, K], along which a weight is split.
_LINEAR = {"colwise": 0, "colwise_rep": 0, "colwise_gather_output": 0, "packed_colwise": 0}
_LINEAR |= {"rowwise": 1, "rowwise_rep": 1, "rowwise_split_input": 1}
_EMBEDDING = {"embedding_rowwise": 0, "rowwise": 0, "embedding_colwise": 1, "colwise": 1}
_EXPERTS = {"packed_colwise": 1, "rowwise": 2, "grouped_gemm": 0}
# Of a whole norm, where every rank has other heads: its gradients are to be summed over ranks.
SUMS_GRADIENTS = "replicated_with_grad_allreduce"
# Styles that leave parameters whole.
_WHOLE = {"mla_kv_a_proj", "replicate", "all_reduce", "local_params", SUMS_GRADIENTS}
GATHERS = {"colwise_rep", "colwise_gather_output"}
SPLITS_INPUT = {"rowwise_rep", "rowwise_split_input"}
# Styles whose forward a parallel layer replaces.
PARALLEL_FORWARDS = set(_LINEAR) | set(_EMBEDDING)


class PartStyle:
    """A style of transformers for the parameters of one rule, quantized or not.

    One rule covers a layer of every depth, and some depths may be unquantized: those get the original style.

    Args:
        original: the style's name in transformers.
    """

    def __init__(self, original: str) -> None:
        self.original = original

    def validate_param(
        self, module: nn.Module, param: str, mesh: Any, parameter_name: str | None = None
    ) -> None:
        """Check an unquantized parameter as transformers does; `shard_param` checks quantized ones."""
        if not isinstance(module, QuantizedModule):
            style = ALL_PARALLEL_STYLES[self.original]
            style.validate_param(module, param, mesh, parameter_name=parameter_name)

    def shard_param(self, module: nn.Module, param: str, mesh: Any) -> None:
        """Make a parameter a DTensor where this rule splits it.

        Raises:
            ValueError: a quantized weight cannot be split so; the message names the layer.
        """
        if not isinstance(module, QuantizedModule):
            ALL_PARALLEL_STYLES[self.original].shard_param(module, param, mesh)
            return
        by_expert = self.original == "grouped_gemm"
        if by_expert and (param.endswith((PACKED, ABSMAX)) or param in module.shapes):
            # Unquantized placeholders too: each rank then reads and quantizes its own experts only.
            ALL_PARALLEL_STYLES[self.original].shard_param(module, param, mesh)
        elif param.endswith((PACKED, ABSMAX)):
            placement = self._placement(module, original_of(param), mesh.size())
            if placement is not None:
                whole: Any = module._parameters[param]
                part = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
                module._parameters[param] = nn.Parameter(part, requires_grad=False)

    def _placement(self, module: QuantizedModule, weight: str, ranks: int) -> Any:
        kind: dict[str, int] = _LINEAR
        if isinstance(module, KbitExperts):
            kind = _EXPERTS
        elif isinstance(module, KbitEmbedding):
            kind = _EMBEDDING
        if self.original in _WHOLE:
            return None
        if self.original not in kind:
            raise ValueError(
                f"{module.layer_name}: the parallel style {self.original!r} cannot split a quantized weight; "
                f"{sorted(kind)} can. Change the plan, or quantize with modules_to_not_convert="
                f"[{module.layer_name!r}]."
            )
        axis = kind[self.original]
        _check_divisible(module, weight, axis, ranks, packed=self.original == "packed_colwise")
        if self.original == "packed_colwise":
            return _StridedShard(dim=axis, split_factor=2)
        return Shard(axis)


def _check_divisible(module: QuantizedModule, weight: str, axis: int, ranks: int, packed: bool) -> None:
    shape = module.shapes[weight]
    size = shape[axis]
    where = f"{module.layer_name}.{weight}"
    if axis == len(shape) - 1 and size % (BLOCK_SIZE * ranks):
        most = max((n for n in range(1, ranks) if size % (BLOCK_SIZE * n) == 0), default=1)
        raise ValueError(
            f"{where}: {ranks} ranks would split its {size} in-features into {size / ranks:g} each, and a "
            f"quantized weight splits only at multiples of {BLOCK_SIZE}, the size of a block. Use "
            f"{counted(most, 'rank')}, or quantize with modules_to_not_convert="
            f"[{module.layer_name!r}]."
        )
    if packed and size % (2 * ranks):
        raise ValueError(
            f"{where}: its {size} rows are two matrices of {size // 2}, which {ranks} ranks cannot share "
            f"evenly. Use a number of ranks that divides {size // 2}."
        )


def plan_parts(model: Any) -> None:
    """Add the parameters of a model's quantized layers to its tensor and expert parallel plans, in place.

    Args:
        model: a PreTrainedModel on the meta device, with its quantized layers, not yet split.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, QuantizedModule)]
    for plan in (model._tp_plan, model._ep_plan):
        extra = {}
        for name, module in layers:
            generic = replace_layer_number_by_wildcard(name)
            for weight in module.shapes:
                rule = f"{generic}.{weight}" if isinstance(module, KbitExperts) else generic
                style = plan.get(rule)
                if style is None:
                    continue
                for parameter in module._parameters:
                    if parameter == weight or original_of(parameter) == weight or parameter == "dtype_probe":
                        extra[f"{generic}.{parameter}"] = _register(style)
        plan.update(extra)


def _register(style: str) -> str:
    original = style.removeprefix(PREFIX)
    if PREFIX + original not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(PREFIX + original, PartStyle(original))
    return PREFIX + original


def style_of(model: Any, name: str) -> str | None:
    """The style that a plan has for a module's forward; an expert plan comes first."""
    generic = replace_layer_number_by_wildcard(name)
    config = getattr(model.config, "distributed_config", None)
    by_expert = getattr(config, "enable_expert_parallel", False)
    plans = (model._ep_plan, model._tp_plan) if by_expert else (model._tp_plan,)
    return next((plan[generic] for plan in plans if generic in plan), None)
