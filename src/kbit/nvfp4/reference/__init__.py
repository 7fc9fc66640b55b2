"""The definition of every NVFP4 operation, in PyTorch: what the CPU runs and kernels are compared with.

torch.compile runs it as it is. Inductor would keep float32 where the definition rounds to 16 bits, which
changes norms and activations, and takes minutes to compile one layer.
"""

from __future__ import annotations

import torch

from kbit.nvfp4.reference.folds import rmsnorm, rmsnorm_quantize, silu_mul, silu_mul_quantize
from kbit.nvfp4.reference.gemm import gemm, linear, moe_gemm, tiles
from kbit.nvfp4.reference.moe import align, combine, gather_rows, quantize_scatter
from kbit.nvfp4.reference.quantize import dequantize, quantize, quantize_rows, repack
from kbit.nvfp4.reference.tiled import gemm_tiled, linear_tiled, moe_gemm_tiled, moe_linear_tiled

__all__ = [
    "align",
    "combine",
    "dequantize",
    "gather_rows",
    "gemm",
    "gemm_tiled",
    "linear",
    "linear_tiled",
    "moe_gemm",
    "moe_gemm_tiled",
    "moe_linear_tiled",
    "quantize",
    "quantize_rows",
    "quantize_scatter",
    "repack",
    "rmsnorm",
    "rmsnorm_quantize",
    "silu_mul",
    "silu_mul_quantize",
    "tiles",
]

for _name in __all__:
    globals()[_name] = torch.compiler.disable(globals()[_name])
