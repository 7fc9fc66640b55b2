"""Tensor and expert parallelism: the parts of quantized weights in transformers' parallel plans.

transformers splits a model between its construction and its loading: every parameter that a plan names
becomes a DTensor on the meta device, and each rank reads only its part of the checkpoint. `plan_parts` adds
the parts of quantized weights to the plans, the model's and the user's. Rows of codes and of block scales
split alike, and so do columns at multiples of 32. After loading, `sharded.localize` makes plain local
parameters of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from kbit.format.codebook import BLOCK_SIZE
from kbit.format.names import ABSMAX, PACKED, original_of
from kbit.format.words import counted
from kbit.integrations.on_import import wrap_method
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.nn.refusals import has_quantized

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
# Styles of linear layers between which a rank has its part only; others take and give whole tensors.
GIVES_PART = {"colwise", "packed_colwise"}
TAKES_PART = {"rowwise"}
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


def plan_before_splitting() -> None:
    """Have transformers split quantized layers as it splits others. Asking again changes nothing."""
    from transformers import PreTrainedModel

    wrap_method(PreTrainedModel, "maybe_distribute_model", _planned)


def _planned(original: Any) -> Any:
    def maybe_distribute_model(
        cls: Any, model: Any, distributed_config: Any, *rest: Any, **named: Any
    ) -> Any:
        if distributed_config is None or not has_quantized(model):
            return original(cls, model, distributed_config, *rest, **named)
        settings = plan_parts(model, distributed_config)
        model = original(cls, model, settings, *rest, **named)
        if getattr(model.config, "distributed_config", None) is settings:
            model.config.distributed_config = distributed_config
        return model

    return maybe_distribute_model


def plan_parts(model: Any, settings: Any) -> Any:
    """Add the parameters of a model's quantized layers to its tensor and expert parallel plans, in place.

    A user's rules come first, which transformers merges into a model's plan, or before 5.21 takes in its
    place: they get parameters of their own, so that either comes out right.

    Args:
        model: a PreTrainedModel on the meta device, with its quantized layers, not yet split.
        settings: the DistributedConfig by which it will be.

    Returns:
        A copy of the settings, whose plans have these parameters, too.
    """
    settings = copy.copy(settings)
    for name in ("tp_plan", "ep_plan"):
        plan, rules = getattr(model, f"_{name}"), getattr(settings, name, None)
        plan.update(_parts_in(plan, model))
        if isinstance(rules, dict):
            setattr(settings, name, rules | _parts_in(rules, model))
    return settings


def _parts_in(plan: Mapping[str, str], model: Any) -> dict[str, str]:
    """{parameter of a quantized layer: its style}, of the layers that a plan names."""
    parts = {}
    for name, module in model.named_modules():
        generic = replace_layer_number_by_wildcard(name)
        for weight in module.shapes if isinstance(module, QuantizedModule) else ():
            style = plan.get(f"{generic}.{weight}")
            if style is None and not isinstance(module, KbitExperts):
                style = plan.get(generic)
            if style is None or style not in ALL_PARALLEL_STYLES:  # which transformers refuses
                continue
            for parameter in module._parameters:
                if parameter == weight or original_of(parameter) == weight or parameter == "dtype_probe":
                    parts[f"{generic}.{parameter}"] = _register(style)
    return parts


def _register(style: str) -> str:
    original = style.removeprefix(PREFIX)
    if PREFIX + original not in ALL_PARALLEL_STYLES:
        ALL_PARALLEL_STYLES.register(PREFIX + original, PartStyle(original))
    return PREFIX + original


def style_of(model: Any, name: str) -> str | None:
    """The style of a module or parameter in the plans by which a model was split.

    Rules of an expert plan come first, and parts of what they name have no others.
    """
    generic = replace_layer_number_by_wildcard(name)
    config = getattr(model.config, "distributed_config", None)
    if getattr(config, "enable_expert_parallel", False):
        steps = generic.split(".")
        if any(".".join(steps[:count]) in model._ep_plan for count in range(1, len(steps) + 1)):
            return model._ep_plan.get(generic)
    if (getattr(config, "tp_size", None) or 1) == 1:
        return None
    return model.tp_plan.get(generic)  # before 5.21 that of experts, where they are split: the only one


def check_fits(model: Any, name: str, module: QuantizedModule, axes: Mapping[str, int | None]) -> None:
    """Refuse a quantized layer whose parts cannot give what the plans say.

    Parts are split by another rule where a head is tied to a table, and by none where it was not a plan's.

    Args:
        model: a PreTrainedModel, split and loaded.
        name: the layer's.
        module: the layer.
        axes: {weight: the dimension along which it is split; None if it is whole}.

    Raises:
        ValueError: so; the message names the layer.
    """
    for weight, axis in axes.items():
        if axis is not None and not module.is_tied and style_of(model, f"{name}.{weight}{PACKED}") is None:
            raise ValueError(
                f"{name}.{weight}: its codes are split {_along(axis)}, by no rule of a tensor or expert "
                f"parallel plan, and quantized layers compute by such alone. Use "
                f"DistributedConfig(tp_size=...) without FSDP."
            )
    if isinstance(module, KbitExperts) and tuple(axes.values()) not in ((0, 0), (1, 2), (None, None)):
        raise ValueError(
            f"{name}: the plan splits {' and '.join(f'{weight} {_along(axes[weight])}' for weight in axes)}, "
            f"which do not fit. Use 'grouped_gemm' for both, or 'packed_colwise' and 'rowwise'."
        )
    if isinstance(module, KbitLinear):
        _check_ends(module, name, style_of(model, name), axes["weight"])


def _check_ends(module: KbitLinear, name: str, style: str | None, axis: int | None) -> None:
    """Refuse a linear layer that cannot take or give the part of a tensor that its neighbours look for.

    Where both ends are whole, parts of either kind serve; but a bias is split by the rule.
    """
    wanted = _LINEAR.get(style or "")
    if axis == wanted or (style not in GIVES_PART | TAKES_PART and module.bias is None):
        return
    tied = ", as those of the table that it is tied to" if module.is_tied else ""
    whole = "replicate" if axis is None and module.bias is not None else "colwise_gather_output"
    other = "rowwise_split_input" if axis == 1 else whole
    raise ValueError(
        f"{name}: its codes are split {_along(axis)}{tied}, but the parallel style {style!r} wants them "
        f"split {_along(wanted)}. Use {other!r}."
    )


def _along(axis: int | None) -> str:
    return "nowhere" if axis is None else f"along dimension {axis}"
