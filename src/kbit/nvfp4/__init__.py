"""NVFP4: weights and activations in 4-bit floats with defined, reproducible arithmetic.

Inside, imports point one way: exact < formats < reference < product_kernels < kernels < quantize < readers
< gemm < moe < expert_products < no_gradient < folds < layers < record < model < gate.
"""

from __future__ import annotations

from kbit.nvfp4.expert_products import moe_gemm_nvfp4
from kbit.nvfp4.folds import Normed, rmsnorm, rmsnorm_quantize_nvfp4, silu_mul, silu_mul_quantize_nvfp4
from kbit.nvfp4.formats import NonFiniteError, NVFP4Tensor
from kbit.nvfp4.gemm import CONTRACT_VERSION, gemm_nvfp4, linear_nvfp4, tiles_nvfp4
from kbit.nvfp4.moe import moe_align, moe_combine
from kbit.nvfp4.quantize import dequantize_nvfp4, global_scale_for, quantize_nvfp4, repack_nvfp4
from kbit.nvfp4.readers import from_compressed_tensors, from_gguf, from_modelopt

__all__ = [
    "CONTRACT_VERSION",
    "NVFP4Tensor",
    "NonFiniteError",
    "Normed",
    "dequantize_nvfp4",
    "from_compressed_tensors",
    "from_gguf",
    "from_modelopt",
    "gemm_nvfp4",
    "global_scale_for",
    "linear_nvfp4",
    "moe_align",
    "moe_combine",
    "moe_gemm_nvfp4",
    "quantize_nvfp4",
    "repack_nvfp4",
    "rmsnorm",
    "rmsnorm_quantize_nvfp4",
    "silu_mul",
    "silu_mul_quantize_nvfp4",
    "tiles_nvfp4",
]
