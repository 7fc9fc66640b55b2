"""Layers on quantized weights, and their placement in a model."""

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
