"""From a spec to a cubin: through the cache, by the compiler of the user's choice, one or many at a time."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kbit.backends.cuda.compiler import nvcc, nvrtc
from kbit.backends.cuda.compiler.arch import canonical_arch
from kbit.backends.cuda.compiler.cache import CubinCache, Entry, content_key
from kbit.backends.cuda.compiler.errors import (
    CompilerUnavailableError,
    KbitCompileError,
    UnsupportedArchError,
)
from kbit.backends.cuda.compiler.report import parse
from kbit.backends.cuda.compiler.spec import CSRC, KernelSpec, Sources, read_sources


class Compiler(Protocol):
    """What `nvrtc.Nvrtc` and `nvcc.Nvcc` have in common."""

    kind: str

    @property
    def name(self) -> str:
        """Name and version, for messages."""

    @property
    def identity(self) -> str:
        """Differs between builds whose cubins may differ."""

    def options(self, arch: str) -> tuple[str, ...]:
        """Command line for an architecture."""

    def require(self, arch: str) -> None:
        """Check that it compiles for a canonical architecture; an `UnsupportedArchError` if not."""

    def compile(
        self, kernel: str, sources: Sources, arch: str, options: tuple[str, ...]
    ) -> tuple[bytes, str]:
        """Compile to (cubin, log)."""


COMPILERS: dict[str, Callable[[], Compiler]] = {nvrtc.KIND: nvrtc.Nvrtc, nvcc.KIND: nvcc.Nvcc}


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code for one architecture.

    Attributes:
        arch: such as "90a".
        cubin: an ELF file, for `cuLibraryLoadData`.
        log: what the compiler and ptxas said.
        registers, spill_bytes, stack_bytes, shared_bytes: see `report.Report`.
        seconds: that compiling took, then or now.
        cached: whether it came from the cache.
    """

    spec: KernelSpec
    arch: str
    cubin: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    seconds: float
    cached: bool


def chosen_compiler() -> Compiler:
    """The compiler that KBIT_CUDA_COMPILER names, NVRTC by default.

    Raises:
        CompilerUnavailableError: it is missing, or the name is none.
    """
    kind = os.environ.get("KBIT_CUDA_COMPILER") or nvrtc.KIND
    if kind not in COMPILERS:
        raise CompilerUnavailableError(f"KBIT_CUDA_COMPILER is {kind!r}; known: {', '.join(COMPILERS)}.")
    return COMPILERS[kind]()


def compile_kernel(spec: KernelSpec, arch: str, *, csrc: Path = CSRC) -> CompiledKernel:
    """Compile a kernel, or take it from the cache. Safe in any number of threads and processes.

    KBIT_CUDA_FLAGS holds further options for the compiler, such as -lineinfo for a profiler. Where kernels of
    torch.compile start before those in front of them are done (TORCHINDUCTOR_ENABLE_PDL=1), kbit's let the
    next one start a little later, as those need it.

    Args:
        spec: what to compile.
        arch: for which architecture, such as "90a".
        csrc: folder of the sources.

    Raises:
        KbitCompileError: the compiler refused the source.
        UnsupportedArchError: kbit or the compiler does not know the architecture.
        CompilerUnavailableError: there is no compiler, or KBIT_CUDA_FLAGS cannot be read.
    """
    arch = canonical_arch(arch)
    compiler = chosen_compiler()
    sources = read_sources(spec, csrc)
    options = (*compiler.options(arch), *_further_options())
    cache = CubinCache()
    stem = f"{spec.entry}-sm{arch}"
    key = content_key(sources, options, f"{compiler.kind} {compiler.identity}")
    entry = cache.load(stem, key)
    cached = entry is not None
    if entry is None:
        with cache.lock(stem, key):
            entry = cache.load(stem, key)  # another process may have compiled it while this one waited
            cached = entry is not None
            if entry is None:
                start = time.perf_counter()
                cubin, log = compiler.compile(spec.name, sources, arch, options)
                entry = Entry(cubin, log, time.perf_counter() - start)
                cache.store(stem, key, entry)
    report = parse(entry.log)
    return CompiledKernel(
        spec, arch, entry.cubin, entry.log, **vars(report), seconds=entry.seconds, cached=cached
    )


def _further_options() -> list[str]:
    flags = os.environ.get("KBIT_CUDA_FLAGS", "")
    try:
        options = shlex.split(flags)
    except ValueError as error:  # such as a quotation without its end
        raise CompilerUnavailableError(
            f"KBIT_CUDA_FLAGS is {flags!r}, which is no list of options ({error}). Correct or unset it."
        ) from error
    if _compiled_kernels_start_early():
        options.append("-DKBIT_WAIT_FIRST")  # see launch_early in csrc/common.cuh
    return options


def _compiled_kernels_start_early() -> bool:
    config = sys.modules.get("torch._inductor.config")  # importing kbit need not import it
    if config is None:
        return os.environ.get("TORCHINDUCTOR_ENABLE_PDL") == "1"
    return bool(getattr(config.triton, "enable_pdl", False))


Outcome = CompiledKernel | KbitCompileError | UnsupportedArchError


def compile_many(
    wanted: Iterable[tuple[KernelSpec, str]],
    jobs: int | None = None,
    *,
    csrc: Path = CSRC,
    on_done: Callable[[KernelSpec, str, Outcome], None] | None = None,
) -> list[Outcome]:
    """Compile many kernels in parallel; a refused one is an item of the result and stops no other.

    Threads are enough: NVRTC runs without Python's lock and takes none of its own. On two busy cores, each of
    two threads was on a core or waiting for one during 5.8 of 5.8 seconds.

    Args:
        wanted: (spec, architecture) pairs.
        jobs: threads; the usable cores by default.
        csrc: folder of the sources.
        on_done: called with each pair and its outcome as it is finished, in the caller's thread.

    Returns:
        Outcomes in the order of `wanted`.

    Raises:
        CompilerUnavailableError: there is no compiler.
    """
    pairs = list(wanted)

    def compile_one(pair: tuple[KernelSpec, str]) -> Outcome:
        try:
            return compile_kernel(*pair, csrc=csrc)
        except (KbitCompileError, UnsupportedArchError) as error:
            return error

    with ThreadPoolExecutor(jobs or usable_cores()) as pool:
        futures = {pool.submit(compile_one, pair): pair for pair in pairs}
        try:
            for future in as_completed(futures):
                if on_done is not None:
                    on_done(*futures[future], future.result())
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
