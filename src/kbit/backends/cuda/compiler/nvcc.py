"""Compile with nvcc, for whoever prefers the toolkit's compiler: KBIT_CUDA_COMPILER=nvcc."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kbit.backends.cuda.compiler.arch import require_known
from kbit.backends.cuda.compiler.errors import CompilerUnavailableError, KbitCompileError
from kbit.backends.cuda.compiler.spec import Sources

KIND = "nvcc"
# Environment variables of which nvcc takes options; KBIT_CUDA_FLAGS is for kbit's.
_OPTIONS = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


class Nvcc:
    """The nvcc of KBIT_NVCC, else of CUDA_HOME, else of PATH.

    Raises:
        CompilerUnavailableError: there is none, or it does not run.
    """

    kind = KIND

    def __init__(self) -> None:
        self.path = find_nvcc()
        self._banner = _run_for_text(self.path, "--version")

    @property
    def name(self) -> str:
        """Name and version for messages, such as "nvcc 13.0 (/usr/local/cuda/bin/nvcc)"."""
        release = re.search(r"release (\d+\.\d+)", self._banner)
        return f"nvcc {release[1] if release else '?'} ({self.path})"

    @property
    def identity(self) -> str:
        """What tells one build of the compiler from another, for the cache's key."""
        return self._banner

    def options(self, arch: str) -> tuple[str, ...]:
        """Command line for an architecture; nvcc needs functions marked __device__, NVRTC assumes it."""
        return (
            "-cubin",
            "-std=c++17",
            f"-gencode=arch=compute_{arch},code=sm_{arch}",
            "--expt-relaxed-constexpr",
            "-Xptxas=-v,--warn-on-spills",
        )

    def require(self, arch: str) -> None:
        """Check that this version compiles for a canonical architecture.

        Raises:
            UnsupportedArchError: it does not.
        """
        known = tuple(re.findall(r"sm_(\d+)\b", _run_for_text(self.path, "--list-gpu-code")))
        require_known(arch, known, self.name, "Install a newer CUDA toolkit.")

    def compile(
        self, kernel: str, sources: Sources, arch: str, options: tuple[str, ...]
    ) -> tuple[bytes, str]:
        """Compile to (cubin, log), in a temporary folder.

        Raises:
            UnsupportedArchError: this version does not know `arch`.
            KbitCompileError: the source was refused.
        """
        self.require(arch)
        with tempfile.TemporaryDirectory(prefix="kbit-nvcc-") as name:
            folder = Path(name)
            for file, text in {**sources.headers, sources.name: sources.text}.items():
                (folder / file).write_text(text)
            # Run inside the folder, so that messages name stream.cu(12) and not a path that is soon gone.
            command = [str(self.path), *options, sources.name, "-o", "out.cubin"]
            result = subprocess.run(
                command, cwd=folder, env=_environment(), capture_output=True, text=True, check=False
            )
            log = result.stdout + result.stderr
            if result.returncode:
                raise KbitCompileError(kernel, arch, self.name, options, log)
            return (folder / "out.cubin").read_bytes(), log


def _environment() -> dict[str, str]:
    """That of nvcc: without options for other builds, which the cache's key would not tell apart."""
    return {name: value for name, value in os.environ.items() if name not in _OPTIONS}


def find_nvcc() -> Path:
    """Path of nvcc.

    Raises:
        CompilerUnavailableError: there is none, or KBIT_NVCC names none.
    """
    named = os.environ.get("KBIT_NVCC")
    if named:
        found = shutil.which(named)
        if found is None:
            raise CompilerUnavailableError(
                f"KBIT_NVCC={named} is no program that can be run. Unset it, or correct it."
            )
        return Path(found)
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for candidate in (*(str(Path(home, "bin", "nvcc")) for home in homes), "nvcc"):
        found = shutil.which(candidate)
        if found is not None:
            return Path(found)
    raise CompilerUnavailableError(
        "nvcc was not found: not by KBIT_NVCC, in CUDA_HOME, nor on PATH. Install CUDA's toolkit or name it, "
        "or unset KBIT_CUDA_COMPILER to compile with NVRTC."
    )


@functools.cache
def _run_for_text(path: Path, option: str) -> str:
    try:
        result = subprocess.run([str(path), option], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise CompilerUnavailableError(
            f"`{path} {option}` fails: {error}. Set KBIT_NVCC to one that works."
        ) from error
    return result.stdout
