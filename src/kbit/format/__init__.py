"""The format, in pure PyTorch: codebooks, E4M4, bit-planes, `QuantizedTensor`, policy, checkpoint names."""

from kbit.format.codebook import (
    BLOCK_SIZE,
    CODEBOOKS,
    SUPPORTED_BITS,
    block_optimal_float,
    get_codebook,
    normal_float,
)
from kbit.format.policy import QuantizationPolicy
from kbit.format.scales import ABSMAX_FORMATS
from kbit.format.tensor import QuantizedTensor

__all__ = [
    "ABSMAX_FORMATS",
    "BLOCK_SIZE",
    "CODEBOOKS",
    "SUPPORTED_BITS",
    "QuantizationPolicy",
    "QuantizedTensor",
    "block_optimal_float",
    "get_codebook",
    "normal_float",
]
