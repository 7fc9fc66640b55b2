"""Layers on quantized weights, and their placement in a model.

linear, embedding, experts        the layers; parts, tiling, tied, initialized: what they share
replace, dequantize               quantize_model, dequantize_model; refusals, support, sizes, leftovers: what
                                  they refuse or leave; unwrap: models that torch.compile wrapped
calibration, early_end            codes chosen by sample inputs
fuse, fused_experts, replaced     fused experts: matrices, modules, what they stood for
rows, casts, symbolic             parts of a layer; moves without casts; torch.fx
together                          what runs in fewer launches: norm, residuals, router, merged,
                                  shared_expert, rotary, gated_delta; by mixins and standing_in
attention_layers, delta_families  what transformers calls its layers
ahead                             compile_kernels
"""

from kbit.nn.ahead import compile_kernels
from kbit.nn.dequantize import dequantize_model
from kbit.nn.embedding import KbitEmbedding
from kbit.nn.experts import KbitExperts
from kbit.nn.linear import KbitLinear
from kbit.nn.parts import QuantizedModule
from kbit.nn.replace import quantize_model

__all__ = [
    "KbitEmbedding",
    "KbitExperts",
    "KbitLinear",
    "QuantizedModule",
    "compile_kernels",
    "dequantize_model",
    "quantize_model",
]
