"""NVFP4: weights and activations in 4-bit floats with defined, reproducible arithmetic.

Inside, imports point one way: exact < formats < reference < kernels < quantize < readers < gemm < moe < folds <
layers < model < gate.
"""

from __future__ import annotations
