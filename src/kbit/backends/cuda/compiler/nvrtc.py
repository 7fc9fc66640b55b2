"""Compile with NVRTC, the compiler as a library, which a CUDA build of torch brings along."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

from kbit.backends.cuda.compiler.arch import require_known
from kbit.backends.cuda.compiler.errors import INSTALL, CompilerUnavailableError, KbitCompileError
from kbit.backends.cuda.compiler.spec import Sources

KIND = "nvrtc"
_REMEDY = f"{INSTALL}, or set KBIT_CUDA_COMPILER=nvcc where CUDA's toolkit is installed."


class Nvrtc:
    """The NVRTC that cuda-bindings finds; needs neither a driver nor a GPU nor CUDA's headers.

    Raises:
        CompilerUnavailableError: cuda-bindings or the library is missing.
    """

    kind = KIND

    def __init__(self) -> None:
        self._nvrtc = _bindings()
        self._version = _version()

    @property
    def name(self) -> str:
        """Name and version for messages, such as "NVRTC 13.0"."""
        return f"NVRTC {self._version[0]}.{self._version[1]}"

    @property
    def identity(self) -> str:
        """What tells one build of the compiler from another, for the cache's key."""
        return f"{self.name} {_library_size()}"

    def options(self, arch: str) -> tuple[str, ...]:
        """Command line for an architecture."""
        return (
            f"--gpu-architecture=sm_{arch}",
            "-std=c++17",
            "-default-device",
            "--ptxas-options=-v",
            "--ptxas-options=--warn-on-spills",
            # From 13 on it has a cache of its own where there is a driver: twice the disk, misleading times.
            *(("-no-cache",) if self._version >= (13, 0) else ()),
        )

    def require(self, arch: str) -> None:
        """Check that this version compiles for a canonical architecture.

        Raises:
            UnsupportedArchError: it does not.
        """
        known = tuple(map(str, self._call("nvrtcGetSupportedArchs")))
        upgrade = f"Upgrade: pip install -U {package_of(self._version[0])}"
        if self._version[0] < 13:  # whose package ends with it
            upgrade += f", or to a torch for CUDA 13, with {package_of(13)}"
        require_known(arch, known, self.name, upgrade)

    def compile(
        self, kernel: str, sources: Sources, arch: str, options: tuple[str, ...]
    ) -> tuple[bytes, str]:
        """Compile to (cubin, log). Safe in several threads at once, and they run in parallel.

        Raises:
            UnsupportedArchError: this version does not know `arch`.
            KbitCompileError: the source was refused.
        """
        self.require(arch)
        headers = sources.headers
        program = self._call(
            "nvrtcCreateProgram",
            sources.text.encode(),
            sources.name.encode(),
            len(headers),
            [text.encode() for text in headers.values()],
            [name.encode() for name in headers],
        )
        try:
            encoded = [option.encode() for option in options]
            (code,) = self._nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
            log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise KbitCompileError(kernel, arch, self.name, options, log or code.name)
            return self._text(program, "CUBIN"), log
        finally:
            self._nvrtc.nvrtcDestroyProgram(program)

    def _text(self, program: object, what: str) -> bytes:
        # cuda-bindings fills the bytes object that it is given.
        content = b"\0" * self._call(f"nvrtcGet{what}Size", program)
        self._call(f"nvrtcGet{what}", program, content)
        return content

    def _call(self, function: str, *arguments: object) -> Any:
        code, *values = getattr(self._nvrtc, function)(*arguments)
        if code != self._nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{self.name}: {function} failed with {code.name}.")
        return values[0] if values else None


def package_of(major: int) -> str:
    """Name of the package with NVRTC of a major version of CUDA."""
    return "nvidia-cuda-nvrtc" if major >= 13 else f"nvidia-cuda-nvrtc-cu{major}"


def _bindings() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompilerUnavailableError(
            f"compiling CUDA kernels needs cuda-bindings, which cannot be imported ({error}). {_REMEDY}"
        ) from error
    return nvrtc


def _version() -> tuple[int, int]:
    try:
        code, major, minor = _bindings().nvrtcVersion()
    except RuntimeError as error:  # the library is looked for at the first call
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else "not found"
        raise CompilerUnavailableError(
            f"cuda-bindings is installed, but not the NVRTC library ({first_line}). {_REMEDY}"
        ) from error
    if int(code):
        raise CompilerUnavailableError(
            f"NVRTC does not tell its version ({code.name}); reinstall nvidia-cuda-nvrtc."
        )
    return major, minor


@functools.cache
def _library_size() -> int:
    """Bytes of the loaded library: NVRTC tells 13.0, but not whether it is 13.0.48 or 13.0.88."""
    path = library_path()
    return path.stat().st_size if path is not None else 0


def library_path() -> Path | None:
    """Where the library was loaded from; None where that cannot be told."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return Path(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except (ImportError, RuntimeError, OSError, TypeError):
        return None
