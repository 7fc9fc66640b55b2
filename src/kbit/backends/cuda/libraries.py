"""Compiled kernels in the driver's libraries, which all devices of an architecture share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kbit.backends.cuda import driver
from kbit.backends.cuda.compiler import CompiledKernel, KernelSpec, chosen_compiler, compile_kernel, nvrtc
from kbit.backends.cuda.driver import DriverError

# cuLibraryLoadData's words for "made by a newer compiler than I know", and for "not for this GPU".
REFUSALS = (
    "INVALID_IMAGE",
    "NO_BINARY_FOR_GPU",
    "UNSUPPORTED_PTX_VERSION",
    "INVALID_SOURCE",
    "NOT_SUPPORTED",
)

_libraries: dict[tuple[KernelSpec, str, Path], tuple[CompiledKernel, Any]] = {}


def library_kernel(spec: KernelSpec, arch: str, csrc: Path) -> tuple[CompiledKernel, Any]:
    """The kernel's handle in a library, which all devices of an architecture share."""
    key = (spec, arch, csrc)
    if key not in _libraries:
        cuda, compiled = driver.api(), compile_kernel(spec, arch, csrc=csrc)
        try:
            with driver.lenient_capture():
                library = driver.check(
                    cuda.cuLibraryLoadData(compiled.cubin, [], [], 0, [], [], 0), "cuLibraryLoadData"
                )
            handle = driver.check(cuda.cuLibraryGetKernel(library, spec.entry.encode()), "cuLibraryGetKernel")
        except RuntimeError as error:  # also what cuda-bindings raises where the driver lacks the function
            if isinstance(error, DriverError) and not any(word in str(error) for word in REFUSALS):
                raise
            version = driver.driver_version()
            major = version.partition(".")[0]
            package = nvrtc.package_of(int(major))
            raise DriverError(
                f"the driver, made for CUDA {version}, does not take {spec.name} as {chosen_compiler().name} "
                f"compiled it for sm_{arch} ({error}). Update the driver, or compile with its version: "
                f"pip install '{package}=={version}.*' 'cuda-bindings=={major}.*'"
            ) from error
        _libraries[key] = compiled, handle
    return _libraries[key]
