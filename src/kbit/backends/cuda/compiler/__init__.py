"""Compile CUDA kernels on the user's machine, for its very GPU, and keep what was compiled.

    spec = KernelSpec.make("stream.cu", bits=4, bf16=False)
    kernel = compile_kernel(spec, "90a")       # from the cache, or by NVRTC in about a second
    kernel.cubin, kernel.registers, kernel.spill_bytes

No GPU, driver or CUDA header is needed. Environment: KBIT_CUDA_COMPILER (nvrtc or nvcc), KBIT_NVCC (its
path), KBIT_CUDA_FLAGS (further options), KBIT_CACHE (the cache's folder).

Which exception means what (all but the last two are `KbitError`, so `ValueError`):

- `CompilerUnavailableError`: this machine lacks something to install or to name: cuda-bindings, the NVRTC
  library, nvcc. Another backend may take over; retrying without installing is useless.
- `UnsupportedArchError`: the GPU is older than sm_80, or newer than this compiler. Another backend may do.
- `KbitCompileError`: a source was refused. A defect of kbit or of KBIT_CUDA_FLAGS: let it surface.
- OSError: kbit's own sources cannot be read; the installation is damaged.
- RuntimeError: NVRTC failed where it has no reason to (no memory).

Nothing about the cache raises: an unusable folder is one warning, a damaged file is compiled anew.
"""

from kbit.backends.cuda.compiler.arch import arch_of, as_on_chips, canonical_arch
from kbit.backends.cuda.compiler.build import (
    COMPILERS,
    CompiledKernel,
    Compiler,
    Outcome,
    chosen_compiler,
    compile_kernel,
    compile_many,
)
from kbit.backends.cuda.compiler.cache import CubinCache, cubin_folder, folder_problem
from kbit.backends.cuda.compiler.errors import (
    INSTALL,
    CompilerUnavailableError,
    KbitCompileError,
    UnsupportedArchError,
)
from kbit.backends.cuda.compiler.spec import CSRC, KernelSpec

__all__ = [
    "COMPILERS",
    "CSRC",
    "CompiledKernel",
    "Compiler",
    "CompilerUnavailableError",
    "CubinCache",
    "INSTALL",
    "KbitCompileError",
    "KernelSpec",
    "Outcome",
    "UnsupportedArchError",
    "arch_of",
    "as_on_chips",
    "canonical_arch",
    "chosen_compiler",
    "compile_kernel",
    "compile_many",
    "cubin_folder",
    "folder_problem",
]
