"""Saving fused experts the way the model's own checkpoints store them: one by one, gate and up apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, revert_weight_conversion

from kbit.format.codebook import get_codebook
from kbit.format.names import PARTS, original_of
from kbit.format.policy import QuantizationPolicy
from kbit.format.words import first_of
from kbit.integrations.transformers.names import converted_parts, lost_in_files, own_conversions
from kbit.integrations.transformers.plan import is_expert_merge
from kbit.nn.experts import KbitExperts
from kbit.nn.fused_experts import WEIGHTS, is_experts
from kbit.nn.parts import QuantizedModule


class SplitScales(ConversionOps):
    """Save a fused parameter's factors: one per expert and source, and only those that are not 1."""

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name="", **kwargs):
        """Return {name of an expert's factor: float32 scalar}; the interface is transformers'."""
        (value,) = input_dict.values()
        factors = value[0] if isinstance(value, list) else value
        # Full names: the caller finds the prefix to add only if expert 0 is among the results.
        prefix = full_layer_name.partition(target_patterns[0])[0]
        return {
            prefix + pattern.replace("*", str(expert)): factor.clone()
            for pattern, column in zip(target_patterns, _columns(factors, len(target_patterns)), strict=True)
            for expert, factor in enumerate(column)
            if float(factor) != 1.0
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Only ever used reversed."""
        return self


def _columns(factors: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
    """Factors [E] or [E, count] -> count times [E]."""
    return factors.unbind(-1) if factors.dim() > 1 else [factors] * count


class SplitRows(ConversionOps):
    """Save a fused part: rows split over the sources, experts one by one."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        """Return {name of an expert's part: tensor}; the interface is transformers'."""
        (value,) = input_dict.values()
        fused = value[0] if isinstance(value, list) else value
        return {
            pattern.replace("*", str(expert)): matrix.contiguous()
            for pattern, rows in zip(target_patterns, fused.chunk(len(target_patterns), dim=1), strict=True)
            for expert, matrix in enumerate(rows.unbind(0))
        }

    @property
    def reverse_op(self) -> ConversionOps:
        """Only ever used reversed."""
        return self


def refuse_conversions(model: Any) -> None:
    """Refuse to save codes that transformers would convert as if they were weights, or not find again.

    Raises:
        ValueError: the model's checkpoints hold a layer in another layout, or by a name for weights alone.
    """
    modules = [
        module
        for module, entry in converted_parts(model).items()
        if not any(isinstance(op, SplitRows) for op in entry.operations)
    ]
    if modules:
        raise ValueError(
            f"save_pretrained: checkpoints of {type(model).__name__} hold in another layout "
            f"{first_of(modules)}; transformers cannot put codes into it. Save after model.dequantize(), or "
            f"leave those unquantized by modules_to_not_convert or overrides."
        )
    lost = lost_in_files(model)
    if lost:
        raise ValueError(
            f"save_pretrained: checkpoints of {type(model).__name__} give {first_of(lost)} names by which "
            f"transformers would not find codes again. Leave those unquantized by modules_to_not_convert or "
            f"overrides."
        )


def refuse_other_levels(model: Any, policy: QuantizationPolicy) -> None:
    """Refuse to save layers that loading by the model's config would decode to other weights.

    Args:
        model: a PreTrainedModel.
        policy: what its config will say.

    Raises:
        ValueError: a layer, set by hand, has another codebook or other block scales than the config states.
    """
    stated = {bits: get_codebook(policy.codebook_for(bits), bits).tolist() for bits in policy.widths()}
    for name, module in model.named_modules():
        if not isinstance(module, QuantizedModule):
            continue
        if module.levels != stated.get(module.bits, module.levels):
            other = f"another codebook of {module.bits} bits than"
        elif module.absmax_format != policy.absmax_format:
            other = f"block scales in {module.absmax_format}, not {policy.absmax_format} as"
        else:
            continue
        raise ValueError(
            f"save_pretrained: {name} has {other} the model's quantization config says, by which it would be "
            f"loaded. Quantize it as the others are, or replace it by an unquantized layer."
        )


def with_experts(model: Any, conversions: list) -> list:
    """A model's conversions, plus those that save the parts of its quantized experts.

    Args:
        model: a PreTrainedModel.
        conversions: what transformers is to undo when it saves.
    """
    if not any(isinstance(module, KbitExperts) for module in model.modules()):
        return conversions
    ours = []
    for entry in get_model_conversion_mapping(model, add_legacy=False):
        if not isinstance(entry, WeightConverter) or not is_expert_merge(entry):
            continue
        operations = (SplitRows(), SplitRows(), SplitScales())
        for (sources, targets), operation in zip(names_of(entry), operations, strict=True):
            ours.append(copy_converter(entry, sources, targets, [operation]))
    # Saving walks the list backwards and takes the first match. Ours must be it: before transformers 5.21 the
    # original's pattern matches the longer names too.
    return conversions + ours


def without_experts(model: Any, conversions: list) -> list:
    """What `with_experts` was given, and what a model's own checkpoints need for experts.

    Of a model that was loaded with quantized experts, transformers kept only conversions that it had used.

    Args:
        model: a PreTrainedModel whose experts were dequantized.
        conversions: what transformers is to undo when it saves.
    """
    kept = [
        entry
        for entry in conversions
        if not any(isinstance(op, SplitRows | SplitScales) for op in getattr(entry, "operations", ()))
    ]
    weights = [
        f"{name}.{weight}"
        for name, module in model.named_modules()
        if is_experts(module)
        for weight in WEIGHTS
    ]
    missing = [name for name in weights if not any(_renames(entry, name) for entry in kept)]
    ours = [entry for entry in own_conversions(model) if any(_renames(entry, name) for name in missing)]
    return kept + ours


def _renames(entry: Any, weight: str) -> bool:
    """Whether undoing a conversion gives the weight itself, not just its modules, another name."""
    try:
        renamed, _ = entry.reverse_transform().rename_source_key(weight)
    except NotImplementedError:  # it cannot be undone; then saving says so
        return False
    return renamed.rpartition(".")[2] != weight.rpartition(".")[2]


def stored_parts(model: Any) -> dict[str, torch.Tensor]:
    """The parts of a model's quantized weights, named and cut as `save_pretrained` writes them."""
    parts = {name: part for name, part in model.state_dict().items() if original_of(name) != name}
    return revert_weight_conversion(model, parts)


def names_of(converter: WeightConverter) -> Iterator[tuple[list[str], list[str]]]:
    """For each part: a converter's source and target patterns with that part's suffix."""
    for part in PARTS:
        sources = [pattern.removesuffix("$") + part for pattern in converter._original_source_patterns]
        yield sources, [pattern + part for pattern in converter._original_target_patterns]


def copy_converter(
    converter: WeightConverter, sources: list[str], targets: list[str], operations: list[ConversionOps]
) -> WeightConverter:
    """A converter of the same scope with other patterns and operations."""
    # Lists of its own: a converter rewrites those it is given, which may be another's.
    copy = WeightConverter([*sources], [*targets], operations=operations)
    copy.scope_prefix, copy.base_model_prefix = converter.scope_prefix, converter.base_model_prefix
    return copy
