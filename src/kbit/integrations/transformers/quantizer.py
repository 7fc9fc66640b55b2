"""KbitHfQuantizer: what transformers calls around loading and saving a model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from kbit.format.checkpoint import check_index, policy_in_files
from kbit.format.codebook import BLOCK_SIZE
from kbit.format.policy import QUANT_METHOD
from kbit.format.safetensors_header import TensorInfo
from kbit.format.scales import absmax_format
from kbit.integrations.devices import is_distributed
from kbit.integrations.transformers.config import KbitConfig
from kbit.integrations.transformers.in_memory import InMemory
from kbit.nn.dequantize import dequantize_model
from kbit.nn.parts import QuantizedModule
from kbit.nn.replace import NOTHING_QUANTIZED
from kbit.nn.together import run_together

logger = logging.get_logger(__name__)


def as_config(policy: Any) -> Any:
    """A policy, a copy, with what transformers asks of a config.

    Raises:
        TypeError, ValueError: a field was changed since the policy was made, to what it may not be.
    """
    if not isinstance(policy, KbitConfig):
        return KbitConfig.from_dict(policy.to_dict())
    copied = copy.deepcopy(policy)
    copied.validate()
    return copied


class KbitHfQuantizer(InMemory, HfQuantizer):
    """Quantizes while loading, and loads and saves what is quantized.

    Attributes:
        plan: {parameter: Planned}, made before loading; see `kbit.integrations.transformers.plan`.
        index: the checkpoint's tensors, or None if it is not in safetensors files.
        ties: names of tied parameters, (target, source), of which one at least is quantized.
        failure: why experts that only this rank reads could not be quantized, until all ranks raise it.
    """

    requires_calibration = False
    quantization_config: Any

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(as_config(quantization_config), **kwargs)
        self.plan: dict[str, Any] = {}
        self.index: dict[str, TensorInfo] | None = None
        self.ties: list[tuple[str, str]] = []
        self.failure: Exception | None = None
        self._originals: dict[int, Any] = {}

    # -- before loading --------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> Any:
        # Imported here because transformers' registry, which imports this module, comes before its loader.
        from kbit.integrations.transformers import placement
        from kbit.integrations.transformers.plan import build_plan

        policy = self.quantization_config
        self.index = placement.read_index(checkpoint_files)
        if self.pre_quantized:
            if self.index is None:
                raise ValueError(
                    "a kbit checkpoint is loaded from a folder of safetensors files; got a state dict or "
                    "pickled weights."
                )
            policy = self.quantization_config = policy_in_files(policy, self.index)
            model.config.quantization_config = policy
            check_index(self.index, policy, model.config.to_dict())
        self.plan = build_plan(model, policy, self.index, self.pre_quantized)
        self.ties = placement.plan_ties(model, self.plan, refuse=self.pre_quantized)
        placement.place(model, self.plan, policy, placeholders=not self.pre_quantized)
        placement.place_ties(model, self.ties, self.plan, policy)
        if self.pre_quantized:
            assert self.index is not None
            placement.prepare_stored_parts(model, self.plan, self.index)
        if is_distributed():
            from kbit.integrations.transformers.parallel import plan_before_splitting

            # Not now: what a user says of the plan comes with the splitting, which follows.
            plan_before_splitting()
        return model

    # -- while loading ---------------------------------------------------------------------------------------

    def update_weight_conversions(self, weight_conversions: list, model: Any = None) -> list:
        """Have experts that are fused from several tensors quantized, or fused as codes."""
        from transformers.core_model_loading import WeightConverter

        from kbit.integrations.transformers.operations import FuseExperts, FuseFactors, GatherSources
        from kbit.integrations.transformers.plan import is_expert_merge
        from kbit.integrations.transformers.saving import copy_converter, names_of

        merged = {pattern for planned in self.plan.values() if planned.merged for pattern in planned.sources}
        first, rest = [], []
        for entry in weight_conversions:
            ours = isinstance(entry, WeightConverter) and merged.intersection(entry.source_patterns)
            if not ours or not is_expert_merge(entry):
                rest.append(entry)
            elif self.pre_quantized:
                (packed, target), (absmax, _), (factors, scale) = names_of(entry)
                # Ahead of the original, whose pattern also matches the longer names before transformers 5.21.
                first.append(copy_converter(entry, packed + absmax, target, [FuseExperts(self, entry)]))
                first.append(copy_converter(entry, factors, scale, [FuseFactors(self, entry)]))
                rest.append(entry)
            else:
                patterns = (entry._original_source_patterns, entry._original_target_patterns)
                gather = copy_converter(entry, *patterns, [GatherSources(self, entry)])
                self._originals[id(gather)] = entry
                rest.append(gather)
        return first + rest

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether the loader is to hand this parameter to `Quantize`."""
        return not self.pre_quantized and param_name in self.plan

    def get_quantize_ops(self) -> Any:
        """The operation that quantizes a parameter."""
        from kbit.integrations.transformers.operations import Quantize

        if is_distributed():
            from kbit.integrations.transformers.failures import QuantizeAmongRanks

            return QuantizeAmongRanks(self)
        return Quantize(self)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes per element, for the planning of device maps: placeholders shrink to their codes."""
        if self.param_needs_quantization(model, param_name):
            scales = absmax_format(self.quantization_config.absmax_format).bytes / BLOCK_SIZE
            return self.plan[param_name].bits / 8 + scales
        return super().param_element_size(model, param_name, param)

    # -- after loading ---------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        from kbit.integrations.transformers import inplace, names, placement, report, saving

        policy = self.quantization_config
        placement.finish_ties(model, self.ties)
        if is_distributed():
            from kbit.integrations.transformers import sharded

            sharded.localize(model)
        for module in model.modules():
            if isinstance(module, QuantizedModule):
                placement.unmark_initialized(module, module.shapes)
                module.freeze_parts()  # the loader makes every float parameter trainable
                module.reset_constants(policy.codebook_for(module.bits))
                module.prepare()
        self._check_loaded(model)
        run_together(model)
        restored = self._restored(model._weight_conversions)
        model._weight_conversions = saving.with_experts(model, restored)
        left = report.unquantized(model, policy, names.names_in_files(model))
        if left is not None:
            logger.warning_once("%s", left)  # not again where the model is saved and loaded
        if not self.pre_quantized:
            self.quantization_config = names.stated_policy(model, policy)
            model.config.quantization_config = self.quantization_config
        if inplace.forget_if_plain(model) and not self.pre_quantized:
            logger.warning("%s", NOTHING_QUANTIZED)
        self.index, self._originals = None, {}  # only the load needed them
        return model

    def _check_loaded(self, model: Any) -> None:
        """Raise what went wrong with this rank's weights, or another's."""
        from kbit.integrations.transformers import placement

        def check() -> None:
            if self.failure is not None:
                raise self.failure
            placement.check_factors(model)

        if not is_distributed():
            check()
            return
        from kbit.integrations.transformers import collectives, failures

        failures.raise_together(model, check)
        collectives.use_where_possible(model)

    def _restored(self, conversions: list) -> list:
        """The model's own conversions again, without the ones that were only for loading."""
        from kbit.integrations.transformers.operations import FuseExperts

        restored = [self._originals.get(id(entry), entry) for entry in conversions or []]
        operations = [getattr(entry, "operations", ()) for entry in restored]
        return [
            entry
            for entry, ops in zip(restored, operations, strict=True)
            if not any(isinstance(op, FuseExperts) for op in ops)
        ]

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict]:
        """Gather a model that is split over ranks: every rank must save. Others transformers asks itself."""
        from kbit.integrations.transformers import saving

        saving.refuse_conversions(model)
        saving.refuse_other_levels(model, self.quantization_config)
        if is_distributed():
            from kbit.integrations.transformers.sharded import gathered_state_dict, has_parallel_layers

            if has_parallel_layers(model):
                return gathered_state_dict(model), {}
        return None, {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """What `model.dequantize()` calls; see `kbit.dequantize_model`."""
        # By default the config's, of which saving makes a name.
        return dequantize_model(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)

    # -- what transformers asks ------------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """Whether save_pretrained works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained on top."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether torch.compile can trace the model."""
        return True


# Not by register_quantizer, which refuses a module that is imported anew.
AUTO_QUANTIZER_MAPPING[QUANT_METHOD] = KbitHfQuantizer
