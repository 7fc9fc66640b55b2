"""Linear layers in vLLM: one weight, or several that it merges into one layer (qkv_proj, gate_up_proj).

While a checkpoint is loaded, a layer has three parameters:

    weight_packed  int32 [rows, blocks * bits]; where merged matrices differ in bits, there is room for the
                   widest, and the narrow ones' words come first in a row
    weight_absmax  uint8 (or the format's) [rows, blocks]
    weight_scale   float32 [n]: a factor for each of n merged matrices, 1 if none is stored
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter

from kbit.format.policy import QuantizationPolicy
from kbit.format.reference import blocks_of
from kbit.integrations.vllm.parameters import (
    PARTS,
    Filling,
    empty_parts,
    refuse_split_blocks,
    show_weight,
    take_parts,
)
from kbit.nn import KbitLinear
from kbit.nn.fuse import Parts


@register_weight_loader_v2_supported_method
class KbitLinearMethod(LinearMethodBase):
    """y = x @ W^T + bias by `KbitLinear`, one for each run of merged matrices of equal width and factor.

    Args:
        policy: the checkpoint's.
        widths: bits of each matrix that the layer merges, or of all.
        name: the layer's, for messages.
    """

    def __init__(self, policy: QuantizationPolicy, widths: Sequence[int], name: str) -> None:
        self.policy, self.widths, self.name = policy, list(widths), name

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
        """Register the parts, empty.

        Raises:
            ValueError: a rank's columns are no whole blocks, or widths differ within what vLLM splits
                otherwise than the checkpoint.
        """
        refuse_split_blocks(input_size_per_partition, input_size, self.name)
        self.sizes, self.columns = list(output_partition_sizes), input_size_per_partition
        self.bits = _bits_of_each(self.widths, len(self.sizes), self.name)
        rows, widest = sum(self.sizes), max(self.bits)
        parts = empty_parts(self.policy, [rows], self.columns, widest, [len(self.sizes)])
        load = extra_weight_attrs["weight_loader"]
        self.filling = Filling(load, parts[0].shape[1] if widest > min(self.bits) else None)
        matrix = {"input_dim": 1, "output_dim": 0}
        made = (
            ModelWeightParameter(data=parts[0], weight_loader=self.filling, **matrix),
            ModelWeightParameter(data=parts[1], weight_loader=load, **matrix),
            PerTensorScaleParameter(data=parts[2], weight_loader=load),
        )
        for name, parameter in zip(PARTS, made, strict=True):
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Put layers of kbit in the place of the parts, as tiles where a kernel takes them.

        Raises:
            ValueError: the checkpoint lacked something.
        """
        self.filling.refuse_missing(len(self.sizes), self.name)
        packed, absmax, scales = take_parts(layer)
        products = [
            self._product(packed[rows], absmax[rows], scale, bits)
            for rows, scale, bits in runs(self.sizes, scales.tolist(), self.bits)
        ]
        layer.products = nn.ModuleList(products)
        show_weight(layer, "weight_packed", products[0])

    def _product(self, packed: torch.Tensor, absmax: torch.Tensor, scale: float, bits: int) -> KbitLinear:
        codebook = self.policy.codebook_for(bits)
        made = KbitLinear(
            self.columns,
            len(packed),
            bias=False,
            bits=bits,
            codebook=codebook,
            absmax_format=self.policy.absmax_format,
            device="meta",
            name=self.name,
        )
        words = blocks_of(self.columns) * bits
        factor = torch.tensor(scale, dtype=torch.float32, device=packed.device)
        # Of the widest of several widths a view would do, and keep alive what the others were padded by.
        packed, padded = packed[:, :words], len(set(self.bits)) > 1
        packed = packed.clone(memory_format=torch.contiguous_format) if padded else packed.contiguous()
        parts = (packed, absmax.contiguous(), factor, codebook.to(packed.device))
        made.fill("weight", Parts(*parts))
        return made

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., columns] -> [..., rows] of x's dtype."""
        products: Any = layer.products
        if len(products) == 1:
            return products[0].product(x, bias)
        y = torch.cat([product(x) for product in products], dim=-1)
        return y if bias is None else y + bias


def _bits_of_each(widths: Sequence[int], count: int, name: str) -> list[int]:
    """Bits of each of `count` matrices."""
    if len(set(widths)) == 1:
        return [widths[0]] * count
    if len(widths) != count:
        raise ValueError(
            f"{name}: vLLM splits it in {count}, the checkpoint holds {len(widths)} matrices of {widths} "
            f"bits. Quantize with one width for all of them."
        )
    return list(widths)


def runs(
    sizes: Sequence[int], scales: Sequence[float], bits: Sequence[int]
) -> list[tuple[slice, float, int]]:
    """Rows of neighbouring matrices of equal factor and width, which are one matrix for the kernels.

    >>> runs([64, 32, 32], [1.0, 1.0, 2.0], [4, 4, 4])
    [(slice(0, 96, None), 1.0, 4), (slice(96, 128, None), 2.0, 4)]
    """
    made, start = [], 0
    for (scale, width), group in groupby(zip(scales, bits, sizes, strict=True), lambda each: each[:2]):
        end = start + sum(size for *_, size in group)
        made.append((slice(start, end), scale, width))
        start = end
    return made
