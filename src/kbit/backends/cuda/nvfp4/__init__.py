"""NVFP4 on CUDA: what `kbit.nvfp4.kernels.Kernels` asks of a device, as functions of this module.

Tensors are contiguous, on one CUDA device, and checked by the caller. Work goes to the current stream of that
device, nothing waits, and sizes follow from shapes alone, so CUDA graphs record it.
"""

from kbit.backends.cuda.nvfp4.folds import rmsnorm, rmsnorm_quantize, silu_mul, silu_mul_quantize
from kbit.backends.cuda.nvfp4.moe import align, combine, moe_gemm, moe_gemm_tiled, moe_linear_tiled
from kbit.backends.cuda.nvfp4.products import gemm, tiles
from kbit.backends.cuda.nvfp4.rows import (
    dequantize,
    gather_rows,
    quantize,
    quantize_rows,
    quantize_scatter,
    repack,
)
from kbit.backends.cuda.nvfp4.tiled import gemm_tiled, linear, linear_tiled

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
