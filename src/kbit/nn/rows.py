"""A layer of some of another's outputs."""

from __future__ import annotations

import torch
from torch import nn

from kbit.nn.fuse import Parts
from kbit.nn.linear import KbitLinear


@torch.inference_mode(False)  # gradients may be asked for later
def with_rows(layer: KbitLinear, rows: torch.Tensor) -> KbitLinear:
    """Some rows of a weight, as a layer of its own. Rows have their own codes and scales, so none changes.

    Args:
        layer: in any form, which it keeps.
        rows: int64 [n], which outputs, in the order wanted.

    Returns:
        A layer of n outputs, with their biases.

    Raises:
        IndexError: the layer has no such row; seen on the CPU.
    """
    packed, absmax = (part.detach() for part in layer._canonical("weight"))
    rows = rows.to(packed.device)
    made = KbitLinear(
        layer.in_features, len(rows), bias=False, bits=layer.bits, device="meta", name=layer.layer_name
    )
    factor, codebook = layer.weight_scale.detach().clone(), layer.codebook
    made.fill("weight", Parts(packed.index_select(0, rows), absmax.index_select(0, rows), factor, codebook))
    if layer.bias is not None:
        bias = layer.bias.detach().index_select(0, rows.to(layer.bias.device))
        made.register_parameter("bias", nn.Parameter(bias, requires_grad=layer.bias.requires_grad))
    made.training = layer.training
    return made
