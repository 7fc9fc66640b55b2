"""The numbers by which compiled kernels know dtypes: of weights and activations, and of block scales."""

from __future__ import annotations

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as Dense<DTYPE> of rows.cuh
ABSMAX_DTYPES = {torch.uint8: 0, torch.float16: 1, torch.float32: 2}  # as in scales.h and rows.cuh
