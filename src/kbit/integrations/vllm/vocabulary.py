"""Embeddings and output heads in vLLM, whose rows it pads and splits over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from kbit.format.policy import QuantizationPolicy
from kbit.integrations.vllm.parameters import PARTS, Filling, empty_parts, show_weight, take_parts
from kbit.nn import KbitEmbedding, KbitLinear
from kbit.nn.fuse import Parts


class KbitVocabularyMethod(QuantizeMethodBase):
    """Rows by `KbitEmbedding`, logits by `KbitLinear`; padded rows are zeros.

    Args:
        policy: the checkpoint's.
        bits: width of the table.
        tied: whether the model's output head is its embedding, which then gives logits too.
        name: the layer's, for messages.
    """

    def __init__(self, policy: QuantizationPolicy, bits: int, tied: bool, name: str) -> None:
        self.policy, self.bits, self.tied, self.name = policy, bits, tied, name
        self.table: Any = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parts, empty."""
        self.columns, self.dtype = input_size_per_partition, params_dtype
        parts = empty_parts(self.policy, [sum(output_partition_sizes)], self.columns, self.bits, [])
        self.filling = Filling(extra_weight_attrs["weight_loader"])
        for name, part in zip(PARTS, parts, strict=True):
            parameter: Any = nn.Parameter(part, requires_grad=False)
            parameter.weight_loader = self.filling if name == PARTS[0] else self.filling.load
            parameter.output_dim = 0 if part.dim() else None
            layer.register_parameter(name, parameter)

    def tie_weights(self, layer: nn.Module, embed_tokens: nn.Module) -> nn.Module:
        """Have a head be an embedding, which is loaded and processed in front of it."""
        for name in PARTS:
            delattr(layer, name)
        method: Any = embed_tokens.quant_method
        if isinstance(method, KbitVocabularyMethod):
            self.table = embed_tokens
            return layer
        layer.quant_method = method  # vLLM's model holds the embedding in 16 bits
        return method.tie_weights(layer, embed_tokens)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Put layers of kbit in the place of the parts.

        Raises:
            ValueError: the checkpoint lacked something.
        """
        if self.table is not None:
            show_weight(layer, "weight", self.table.head)
            return
        if layer.get_parameter("weight_packed").is_meta:  # a head that vLLM dropped: the model pools
            return
        self.filling.refuse_missing(1, self.name)
        packed, absmax, scale = take_parts(layer)
        parts = Parts(packed, absmax, scale, self.policy.codebook_for(self.bits).to(packed.device))
        settings: Any = {"bits": self.bits, "absmax_format": self.policy.absmax_format, "device": "meta"}
        rows, columns = len(packed), self.columns
        if isinstance(layer, ParallelLMHead):
            layer.head = KbitLinear(columns, rows, bias=False, name=self.name, **settings)
            layer.head.fill("weight", parts)
            show_weight(layer, "weight", layer.head)
            return
        layer.table = KbitEmbedding(rows, columns, dtype=self.dtype, name=self.name, **settings)
        layer.table.fill("weight", parts)
        layer.table.reset_parameters()  # the dtype of its rows, on the parts' device
        show_weight(layer, "weight", layer.table)
        if self.tied:
            layer.head = layer.table.tied_head(name=self.name)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        """int ids of any shape -> [*shape, columns] of the model's dtype."""
        table: Any = layer.table
        return table(input_)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., columns] -> logits [..., rows] of x's dtype."""
        head: Any = (self.table or layer).head
        return head.product(x, bias)
