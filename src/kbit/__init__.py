"""kbit: LLM weights in 2 to 5 bits with an arbitrary codebook.

>>> q = kbit.quantize(torch.randn(64, 256), bits=4)
>>> y = kbit.linear(torch.randn(3, 256), q)

Importing kbit also makes transformers able to load kbit checkpoints; transformers itself is imported only
when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kbit import (
    _startup,  # noqa: F401  (imported before torch, for what may happen meanwhile)
    dispatch,  # noqa: F401  (imported for the implementations it registers)
    nn,
)
from kbit._version import __version__
from kbit.dispatch import explain
from kbit.format import QuantizationPolicy, QuantizedTensor, block_optimal_float, normal_float
from kbit.format.errors import KbitError, NonFiniteWeightError
from kbit.integrations.transformers import autoregister
from kbit.integrations.transformers.cuda_graphs import (
    CUDAGraphWarning,
    disable_cuda_graphs,
    enable_cuda_graphs,
)
from kbit.integrations.transformers.prefix_caching import disable_prefix_caching, enable_prefix_caching
from kbit.nn import compile_kernels, dequantize_model, quantize_model
from kbit.ops import dequantize, embedding, grouped_linear, linear, quantize
from kbit.quantizers.fitted import fit_codebook

if TYPE_CHECKING:
    from kbit import nvfp4
    from kbit.integrations.nvfp4 import NVFP4Config
    from kbit.integrations.transformers import KbitConfig

__all__ = [
    "CUDAGraphWarning",
    "KbitConfig",
    "KbitError",
    "NVFP4Config",
    "NonFiniteWeightError",
    "QuantizationPolicy",
    "QuantizedTensor",
    "__version__",
    "block_optimal_float",
    "compile_kernels",
    "dequantize",
    "dequantize_model",
    "disable_cuda_graphs",
    "disable_prefix_caching",
    "embedding",
    "enable_cuda_graphs",
    "enable_prefix_caching",
    "explain",
    "fit_codebook",
    "grouped_linear",
    "linear",
    "nn",
    "normal_float",
    "nvfp4",
    "quantize",
    "quantize_model",
]


def __getattr__(name: str) -> Any:
    if name == "nvfp4":
        import importlib

        return importlib.import_module("kbit.nvfp4")
    # Configs subclass a class of transformers, which takes a second to import.
    if name == "NVFP4Config":
        from kbit.integrations.nvfp4 import NVFP4Config

        return NVFP4Config
    if name == "KbitConfig":
        from kbit.integrations.transformers import KbitConfig

        return KbitConfig
    raise AttributeError(f"module 'kbit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # the configs, too, which only `__getattr__` knows


# Last, since it may wait for another thread, which needs the rest of kbit then.
autoregister.install()
