"""What vLLM knows of a k-bit checkpoint: which layers are quantized, and by which method each runs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import is_pp_missing_parameter

from kbit.format.embeddings import is_token_table
from kbit.format.names import SCALE, original_of
from kbit.format.policy import QUANT_METHOD, QuantizationPolicy
from kbit.integrations.vllm.experts import KbitExpertsMethod
from kbit.integrations.vllm.linear import KbitLinearMethod
from kbit.integrations.vllm.stored import index_of, widths
from kbit.integrations.vllm.vocabulary import KbitVocabularyMethod


@register_quantization_config(QUANT_METHOD)
class KbitVllmConfig(QuantizationConfig):
    """A checkpoint's `quantization_config`, and what its files hold.

    Args:
        policy: the former; None from vLLM where a checkpoint has none.

    Raises:
        ValueError: there is none.

    Attributes:
        widths: {module: bits} of what is quantized, by the names in the files.
        names: {a module's name: its name in the files}: those and, once models said how, vLLM's own.
        taken: names in the files of those that layers are made of.
        factors: names of the stored factors.
        tied: whether the output head is the embedding.
        layers: how many the model has; those with higher numbers are of a draft model.
    """

    def __init__(self, policy: QuantizationPolicy | None = None) -> None:
        super().__init__()
        if policy is None:
            raise ValueError(
                "quantization=kbit: the model's config.json has no quantization_config, so it is no k-bit "
                "checkpoint, and vLLM does not make one. Quantize it first (kbit quantize MODEL OUT), and "
                "serve OUT."
            )
        self.policy = policy
        self.widths: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.taken: set[str] = set()
        self.factors: set[str] = set()
        self.tied = False
        self.layers: int | None = None

    @classmethod
    def get_name(cls) -> Any:
        """`quant_method` of a checkpoint."""
        return QUANT_METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes that a model may run in; on a GPU float32 decodes whole weights, slowly."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The oldest GPU that kbit has kernels for: sm_80, Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: all is in `config.json`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KbitVllmConfig:
        """Read `quantization_config`.

        Raises:
            TypeError, ValueError: see `QuantizationPolicy.from_dict`.
        """
        return cls(QuantizationPolicy.from_dict(config))

    def maybe_update_config(
        self, model_name: str, hf_config: Any = None, revision: str | None = None
    ) -> None:
        """Read the headers of the checkpoint.

        Raises:
            ValueError: it is not what the format says.
        """
        index = index_of(model_name, revision, self.policy)
        self.widths = widths(index)
        self.names = {name: name for name in self.widths}
        self.factors = {name for name in index if name == original_of(name) + SCALE}
        self._refuse_repacked(hf_config)
        text = hf_config.get_text_config() if hf_config is not None else None
        if any(name.rpartition(".")[2] == "lm_head" for name in self.widths):
            # A head of its own, whatever the config says; vLLM looks for one that is not quantized.
            for one in filter(None, (hf_config, text)):
                one.tie_word_embeddings = False
        self.tied = bool(getattr(text, "tie_word_embeddings", False))
        self.layers = getattr(text, "num_hidden_layers", None)

    def _refuse_repacked(self, hf_config: Any) -> None:
        # vLLM's BLOOM takes all tensors of these layers apart by heads, factors too.
        repacked = [name for name in self.factors if name.endswith(f"query_key_value.weight{SCALE}")]
        if repacked and getattr(hf_config, "model_type", None) == "bloom":
            raise ValueError(
                f"{min(repacked)}: vLLM's BLOOM cannot load a factor of query_key_value. Leave these layers "
                f"unquantized: modules_to_not_convert=['query_key_value']."
            )

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Learn what vLLM's model calls its modules. Models inside models say so too."""
        weights = {f"{name}.weight": name for name in self.widths}  # what a mapper knows are names of tensors
        for weight, name in hf_to_vllm_mapper.apply_dict(weights).items():
            self.names[weight.removesuffix(".weight")] = name

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a layer runs; None, or vLLM's own method, for one that is not quantized.

        Raises:
            ValueError: of what a layer merges only some is quantized, or what it computes kbit does not.
        """
        if isinstance(layer, LinearBase):
            found = self._widths_of(prefix)
            return KbitLinearMethod(self.policy, found, prefix) if found else UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            bits = self._width_of(prefix.removesuffix(".routed_experts"))
            return None if bits is None else KbitExpertsMethod(self.policy, bits, layer.moe_config, prefix)
        if isinstance(layer, VocabParallelEmbedding):
            bits = self._width_of(prefix)
            if bits is None and self.tied and isinstance(layer, ParallelLMHead):
                bits = self._width_of_embedding()
            return None if bits is None else KbitVocabularyMethod(self.policy, bits, self.tied, prefix)
        return None

    def plain_modules(self, model: nn.Module) -> dict[str, int | None]:
        """Quantized modules that a model of vLLM's holds in 16 bits, or under names of its own.

        Returns:
            {name in the files: in-features}, of a rank where columns are split; None if unknown.
        """
        found: dict[str, int | None] = {}
        elsewhere = {
            stored for name, stored in self.names.items() if is_pp_missing_parameter(f"{name}.weight", model)
        }
        for name in self.widths:
            if name not in self.taken and name not in elsewhere and not self._is_drafts(name):
                found[name] = None
        held = dict(model.named_parameters())
        for name, stored in self.names.items():
            for one in (name, *self._merging(name)):
                weight = held.get(f"{one}.weight")
                if weight is not None and weight.is_floating_point():
                    found[stored] = weight.shape[-1]
        return found

    def _is_drafts(self, name: str) -> bool:
        """Whether a module is of the small model that guesses tokens, which files hold beside the other."""
        layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        beyond = layer is not None and self.layers is not None and int(layer[1]) >= self.layers
        return beyond or "mtp" in name.split(".")

    def _width_of(self, name: str) -> int | None:
        """Bits of a module that a layer is made of, or None; from now on it is taken."""
        # A model without a head for tokens is saved without the outermost name; vLLM reads it by either.
        stored = self.names.get(name) or self.names.get(name.removeprefix("model."))
        if stored is None:
            return None
        self.taken.add(stored)
        return self.widths[stored]

    def _widths_of(self, prefix: str) -> list[int]:
        """Bits of the matrices that make up a linear layer; none if it is not quantized."""
        bits = self._width_of(prefix)
        if bits is not None:
            return [bits]
        parent, dot, last = prefix.rpartition(".")
        merged = [parent + dot + name for name in self._merged().get(last, ())]
        each = {name: self._width_of(name) for name in merged}
        found = [bits for bits in each.values() if bits is not None]
        if found and len(found) < len(merged):
            missing = ", ".join(name for name, bits in each.items() if bits is None)
            raise ValueError(
                f"{prefix}: vLLM merges {', '.join(merged)} into one layer, and {missing} is not quantized. "
                f"Quantize all of them or none (overrides, modules_to_not_convert)."
            )
        return found

    def _merged(self) -> dict[str, list[str]]:
        """{a layer of vLLM's: the layers that it merges}, by the last parts of their names."""
        return {**_MERGED, **self.packed_modules_mapping}

    def _merging(self, name: str) -> list[str]:
        """The layers of vLLM's that would merge a module."""
        parent, dot, last = name.rpartition(".")
        return [parent + dot + whole for whole, merged in self._merged().items() if last in merged]

    def _width_of_embedding(self) -> int | None:
        """Bits of the input embedding, which a tied head shares; None if it is not quantized."""
        tables = list(filter(is_token_table, self.widths))
        return self._width_of(tables[0]) if tables else None


# What models merge without saying so before they are built.
_MERGED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
