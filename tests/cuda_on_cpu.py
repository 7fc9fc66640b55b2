"""Run the CUDA kernels of products on the CPU: stream, grouped, resident, mma, and NVFP4's.

They are compiled by g++ with cuda_on_cpu.h instead of PTX.

The modules that launch are the real ones; `launcher.load` and `launcher.launch_on` are replaced, so that
indices, sizes and argument lists are tested as well.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kbit.backends.cuda import driver, launcher
from kbit.backends.cuda.compiler import CSRC, KernelSpec

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or "g++"
# Kernels whose threads wait for each other; those of the others run one after another.
TOGETHER = (
    *("stream", "grouped", "resident", "mma", "mma_sums"),
    *(
        "nvfp4_gemm",
        "nvfp4_exact",
        "nvfp4_exact_x",
        "nvfp4_rmsnorm",
        "nvfp4_quantize_rows",
        "nvfp4_quantize_few",
    ),
)
ARGUMENTS = {"Q": ctypes.c_uint64, "i": ctypes.c_int, "f": ctypes.c_float, "T": ctypes.c_char_p}
# Headers that cuda_on_cpu.h, or a header on top of it, stands for.
KNOWN = ("common.cuh", "matrices.cuh", "stage16.cuh", "hopper.cuh", "config.h", "wgmma_instruction.h")
# -O1 takes twice as long to compile, and as long in all. _FORTIFY_SOURCE keeps longjmp to one stack.
FLAGS = (
    "-std=c++17",
    "-Og",
    "-U_FORTIFY_SOURCE",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-w",
    "-fsigned-char",
)

# PTX statements and what stands for them.
PTX = (
    # One unit in the last place off, as a GPU may be.
    (r'asm\("rcp\.approx[^;]*;"[^;]*\);', "inverse = nextafterf(1.0f / scale, 0.0f);"),
    (r'asm\("lop3\.b32[^;]*0xca;"[^;]*\);', "picked = (mask & yes) | (~mask & no);"),
    (r'asm\("max\.NaN\.f32[^;]*;"[^;]*\);', "a = max_or_nan(a, b);"),
    (r'asm volatile\("cp\.async\.ca[^;]*;"[^;]*?"r"\(([^"]*)\),\s*"l"\(([^"]*)\)[^;]*;', r"stage4(\1, \2);"),
    (r'asm volatile\("cp\.async\.wait_group[^;]*;"[^;]*;', ""),
    (
        r'asm volatile\("bar\.sync %0, %1;"[^;]*?"r"\(1 \+ team\), "r"\(threads\)[^;]*;',
        "sync_some(1 + team, threads);",
    ),
    (
        r'asm volatile\("ldmatrix[^;]*;"[^;]*;',
        "load_matrices(reinterpret_cast<u32(&)[4]>(v[at]), address);",
    ),
    (r'asm volatile\("" : "\+[^;]*;', ""),  # what hides values from the compiler
    (r"DEVICE void multiply_bytes.*?\n}\n", ""),
    (r"extern __shared__ [^;]*;", "u8* memory = block_memory();"),
    (r"__shared__", "static"),
    (r"#pragma once", ""),
)


def unavailable_reason() -> str | None:
    """Why nothing can be compiled here, or None."""
    if not shutil.which(COMPILER):
        return f"there is no C++ compiler ({COMPILER})"
    probe = "#include <ucontext.h>\n_Float16 h; ucontext_t c; int main() {}"
    command = [COMPILER, "-x", "c++", "-fsyntax-only", "-"]
    known = subprocess.run(command, input=probe, text=True, capture_output=True).returncode == 0
    return None if known else f"{COMPILER} knows no _Float16, or the system no contexts"


def translated(name: str, seen: set[str]) -> str:
    """A source and what it includes, without PTX."""
    if name in seen or name in KNOWN:
        return ""
    seen.add(name)
    text = (CSRC / name).read_text()
    if name == "rows.cuh":  # of which only the dense elements are used
        text = text[text.index("template <int DTYPE>\nstruct Dense") : text.index("// ---- E4M4")]
    for pattern, replacement in PTX:
        text = re.sub(pattern, replacement, text, flags=re.DOTALL if "multiply_bytes" in pattern else 0)
    text = re.sub(r'#include "([^"]+)"', lambda include: translated(include[1], seen), text)
    assert "asm" not in text, (
        f"{name} has PTX that cuda_on_cpu.py does not know: {re.findall('.*asm.*', text)}"
    )
    return text


def host_source(spec: KernelSpec) -> str:
    """C++ with a function `run`, of a kernel of products."""
    together = spec.entry in TOGETHER
    return with_run(spec, translated(spec.source, set()), "cuda_on_cpu.h", together)


def with_run(spec: KernelSpec, source: str, header: str, together: bool, more_bytes: int = 0) -> str:
    """C++ with a function `run` that takes grid, block, shared memory, cluster and the kernel's arguments.

    Args:
        spec: the kernel.
        source: its source without PTX.
        header: what stands in for PTX.
        together: whether threads of a block wait for each other.
        more_bytes: of shared memory, besides what the launch asks for.
    """
    found = re.search(rf"__global__ void[^{{]*?\b{spec.entry}\((.*?)\)\s*\{{", source, re.DOTALL)
    assert found is not None, spec.entry
    parameters = " ".join(found[1].replace("__restrict__", "").split())
    names = ", ".join(part.split()[-1].lstrip("*") for part in parameters.split(","))
    config = spec.config_header.replace("#pragma once", "")
    return (
        f'#include "{header}"\n{config}\n{source}\n'
        f'extern "C" void run(int grid_x, int grid_y, int grid_z, int threads, int shared_bytes, '
        f"int cluster, {parameters}) {{\n"
        f"    const int grid[3] = {{grid_x, grid_y, grid_z}}, bytes = shared_bytes + {more_bytes};\n"
        f"    launch(grid, threads, bytes, cluster, {str(together).lower()}, "
        f"[=] {{ {spec.entry}({names}); }});\n}}\n"
    )


class Loaded(NamedTuple):
    """A kernel, in the place of the launcher's."""

    spec: KernelSpec
    format: str

    def takes_cluster(self, cluster: int, block: int, smem: int) -> bool:
        return cluster <= launcher.MAX_CLUSTER


_parsed = tempfile.TemporaryDirectory()


@functools.cache
def parse(header: str) -> None:
    """Parse a header once for all kernels of this process: half of a kernel's time otherwise."""
    target = Path(_parsed.name) / f"{header}.gch"
    subprocess.run([COMPILER, *FLAGS, "-x", "c++-header", "-o", str(target), str(HERE / header)], check=True)


class Kernels:
    """Compiled kernels in a folder, in the place of the launcher."""

    def __init__(self, folder: Path, source_of: Callable[[KernelSpec], str] = host_source) -> None:
        self.folder, self.source_of = folder, source_of
        self.function = functools.cache(self._function)

    def _function(self, spec: KernelSpec) -> object:
        stem = re.sub(r"\W+", "_", spec.name)
        source, library = self.folder / f"{stem}.cpp", self.folder / f"{stem}.so"
        text = self.source_of(spec)
        source.write_text(text)
        parse(re.search(r'#include "([^"]+)"', text)[1])
        command = [COMPILER, *FLAGS, f"-I{_parsed.name}", f"-I{HERE}", "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library)).run

    def load(self, spec: KernelSpec, device_index: int, format: str) -> Loaded:
        return Loaded(spec, format)

    def launch_on(
        self,
        device_index: int,
        kernel: Loaded,
        grid: tuple[int, int, int],
        block: int,
        args: tuple[int | float, ...],
        *,
        smem: int = 0,
        pdl: bool = False,
        cluster: int = 1,
    ) -> None:
        spec, format = kernel
        sizes = [ctypes.c_int(number) for number in (*grid, block, smem, cluster)]
        packed = [ARGUMENTS[letter](value) for letter, value in zip(format, args, strict=True)]
        self.function(spec)(*sizes, *packed)


H200 = driver.DeviceLimits(multiprocessors=132, shared_bytes=227 * 1024, arch="90a")


def install(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, limits: driver.DeviceLimits = H200) -> None:
    """Let the modules that launch take CPU tensors, as on a device with such limits."""
    monkeypatch.setattr(launcher, "load", kernels.load)
    monkeypatch.setattr(launcher, "launch_on", kernels.launch_on)
    monkeypatch.setattr(driver, "device_limits", lambda index: limits)


def require_product(
    y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, gated: bool = False
) -> None:
    """Compare with float64, by the bound that rounding of weights, sums and the result gives.

    Args:
        y: [M, N] or, gated, [M, N / 2], 16-bit; poisoned before it was computed.
        x: [M, K].
        w: float64 [N, K], decoded; kernels round levels, or scaled levels, to 16 bits.
        bias: [N], or None.
        gated: y is silu(gate) * up.
    """
    want, info = x.double() @ w.T, torch.finfo(y.dtype)
    want, eps = want if bias is None else want + bias.double(), info.eps
    bound = (x.double().abs() @ w.abs().T) * (eps + x.shape[1] ** 0.5 * 2.0**-23)
    bound += want.abs() * eps + info.smallest_normal * eps
    if gated:
        (gate, up), (of_gate, of_up) = want.chunk(2, dim=1), bound.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        bound = 1.2 * of_gate * up.abs() + gate.abs() * of_up + 4 * eps * want.abs() + eps
    wrong = ~((y.double() - want).abs() <= bound)  # NaN is wrong, too
    assert not bool(wrong.any()), (wrong.nonzero()[:4].tolist(), int(wrong.sum()), y.numel())
