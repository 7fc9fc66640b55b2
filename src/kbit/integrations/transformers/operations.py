"""What runs inside transformers' loader: quantize a tensor that was read, or fuse quantized experts.

The loader catches every exception of a conversion and prints a table instead. Weights with NaN deserve one
clear error, so the work is deferred: an operation returns a `_Deferred`, and computes when the loader, by
then outside its handler, reads the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, MergeModulelist, WeightConverter

from kbit.format.names import ABSMAX, PACKED, SCALE
from kbit.format.tensor import QuantizedTensor
from kbit.integrations.streaming.reader import read_tensor
from kbit.integrations.transformers.placement import mark_initialized
from kbit.integrations.transformers.plan import Planned
from kbit.nn.experts import KbitExperts
from kbit.nn.fuse import Parts, fuse_factors, fuse_rows, parts_of
from kbit.nn.parts import QuantizedModule
from kbit.ops import api

if TYPE_CHECKING:
    from kbit.integrations.transformers.quantizer import KbitHfQuantizer


class _Deferred(dict):
    """A dict whose values are computed when its items are read."""

    def __init__(self, key: str, compute: Callable[[], dict[str, torch.Tensor]]) -> None:
        super().__init__({key: None})
        self._compute = compute

    def items(self) -> Any:
        return self._compute().items()


class Sources(dict):
    """The tensors of one parameter as the checkpoint stores them: {source pattern: a list over experts}."""


class GatherSources(MergeModulelist):
    """First and only operation of an experts converter on load: pass the tensors on, unfused.

    Parameters that stay unquantized are fused by the converter's own operations. It is a
    MergeModulelist because to those the loader hands this rank's experts only, where they are split.
    """

    def __init__(self, quantizer: KbitHfQuantizer, original: WeightConverter) -> None:
        super().__init__(dim=0)
        self.quantizer, self.original = quantizer, original

    def __deepcopy__(self, memo: dict) -> GatherSources:
        # The loader copies converters per parameter; the quantizer and its plan are shared.
        return GatherSources(self.quantizer, self.original)

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        """See the class; the interface is transformers'."""
        if kwargs["full_layer_name"] not in self.quantizer.plan:
            for operation in self.original.operations:
                input_dict = operation.convert(input_dict, source_patterns, target_patterns, **kwargs)
            return input_dict
        # In the converter's order, which is that of the rows: gate, then up.
        return {target_patterns[0]: Sources((pattern, input_dict[pattern]) for pattern in source_patterns)}


class Quantize(ConversionOps):
    """Quantize one parameter: one tensor, or the `Sources` of fused experts."""

    def __init__(self, quantizer: KbitHfQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict, full_layer_name="", model=None, missing_keys=None, **kwargs):
        """Return the parameter's parts under their full names; the interface is transformers'."""
        (value,) = input_dict.values()

        def compute() -> dict[str, torch.Tensor]:
            planned = self.quantizer.plan[full_layer_name]
            module, name = _owner(model, full_layer_name)
            # The placeholder under which the loader knew the tensor. Split over ranks, it is of this rank's
            # experts only; split otherwise, tensors come whole, so that all ranks find the same factors.
            placeholder = module._parameters.pop(name, None)
            if isinstance(module, KbitExperts):
                mark_initialized(module, [name])
            fused = isinstance(value, Sources)
            parts = (self._fused if fused else self._single)(value, planned, placeholder)
            if missing_keys is not None:
                missing_keys.discard(full_layer_name)
            packed, absmax = (module._parameters[name + part] for part in (PACKED, ABSMAX))
            parts = parts._replace(packed=_local(parts.packed, packed), absmax=_local(parts.absmax, absmax))
            return _named(module, name, full_layer_name, parts)

        return _Deferred(full_layer_name, compute)

    def _single(self, value: Any, planned: Planned, placeholder: Any) -> Parts:
        ((name,),) = planned.sources.values()
        tensor = value[0] if isinstance(value, list) else value
        stored = _local(self._as_stored(tensor, name), placeholder)
        return parts_of(self._quantize(stored, planned.bits, name))

    def _fused(self, value: Sources, planned: Planned, placeholder: Any) -> Parts:
        stacks = []
        for pattern, tensors in value.items():
            quantized = []
            for position, name in enumerate(_owned(planned.sources[pattern], placeholder)):
                tensors[position] = self._as_stored(tensors[position], name)
                quantized.append(self._quantize(tensors[position], planned.bits, name))
                tensors[position] = None  # free the 16-bit expert before the next one is done
            stacks.append(QuantizedTensor.stack(quantized))
        return fuse_rows(stacks)

    def _quantize(self, tensor: torch.Tensor, bits: int, name: str) -> QuantizedTensor:
        policy = self.quantizer.quantization_config
        settings = (bits, policy.codebook_for(bits), policy.absmax_format, policy.search)
        return api.quantize(tensor, *settings, where=name)

    def _as_stored(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor before the loader cast it to the model's dtype, where that lost something.

        The codes then do not depend on the dtype a model is loaded in.
        """
        info = (self.quantizer.index or {}).get(name)
        if info is None or tensor.dtype in (info.dtype, torch.float32):
            return tensor
        return read_tensor(name, info, tensor.device)


class FuseExperts(MergeModulelist):
    """Fuse experts that a checkpoint stores quantized one by one: their packed codes and block scales."""

    def __init__(self, quantizer: KbitHfQuantizer, original: WeightConverter) -> None:
        # transformers' loader leaves the dtype of what an operation with this attribute reads alone.
        super().__init__(dim=0)
        self.hf_quantizer, self.original = quantizer, original

    def __deepcopy__(self, memo: dict) -> FuseExperts:
        return type(self)(self.hf_quantizer, self.original)

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name="", model=None, **kwargs):
        """Return the parameter's parts; the interface is transformers'."""

        def compute() -> dict[str, torch.Tensor]:
            # Sources come part by part: all packed, then all absmax.
            stored = [torch.stack(input_dict[pattern]) for pattern in source_patterns]
            count = len(self.original.source_patterns)
            parts = (torch.cat(stored[:count], dim=-2), torch.cat(stored[count:], dim=-2))
            name = target_patterns[0].removesuffix(PACKED)
            return {name + PACKED: parts[0], name + ABSMAX: parts[1]}

        return _Deferred(target_patterns[0], compute)


class FuseFactors(FuseExperts):
    """Fuse the factors of such experts, of which a checkpoint stores those that are not 1."""

    def convert(self, input_dict, source_patterns, target_patterns, full_layer_name="", model=None, **kwargs):
        """Return the parameter's factors; the interface is transformers'."""
        parameter = full_layer_name.removesuffix(SCALE)

        def compute() -> dict[str, torch.Tensor]:
            module, name = _owner(model, parameter)
            planned = self.hf_quantizer.plan[parameter]
            columns = []
            one = next(tensors[0] for tensors in input_dict.values() if tensors).new_ones(())
            for source, pattern in zip(source_patterns, self.original.source_patterns, strict=True):
                stored = iter(input_dict.get(source, []))  # in the order of the names
                names = planned.sources[pattern]
                columns.append(torch.stack([next(stored) if n in planned.scaled else one for n in names]))
            scale = _owned(fuse_factors(columns), module._parameters[name + PACKED])
            # The loader compares shapes with this, before it sets the very same tensor.
            module._parameters[name + SCALE] = nn.Parameter(scale, requires_grad=False)
            return {target_patterns[0]: scale}

        return _Deferred(target_patterns[0], compute)


def _is_split(reference: Any) -> bool:
    """Whether a parameter is a DTensor; asked so that torch.distributed is imported only where it is used."""
    return getattr(reference, "placements", None) is not None


def _local(whole: torch.Tensor, reference: Any) -> torch.Tensor:
    if not _is_split(reference):
        return whole
    from kbit.integrations.transformers.sharded import local_part

    return local_part(whole, reference)


def _owned(of_experts: Any, reference: Any) -> Any:
    if not _is_split(reference):
        return of_experts
    from kbit.integrations.transformers.sharded import owned

    return owned(of_experts, reference)


def _owner(model: nn.Module, parameter: str) -> tuple[Any, str]:
    path, _, name = parameter.rpartition(".")
    return model.get_submodule(path), name


def _named(module: QuantizedModule, name: str, prefix: str, parts: Parts) -> dict[str, torch.Tensor]:
    """The tensors for the loader to set; the factors only if one is not 1."""
    named = {prefix + PACKED: parts.packed, prefix + ABSMAX: parts.absmax}
    if bool((parts.scale != 1).any()):
        module.set_scale(name, parts.scale)  # makes it a parameter, which the loader then finds
        named[prefix + SCALE] = parts.scale
    return named
