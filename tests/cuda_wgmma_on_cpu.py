"""Run wgmma.cu on the CPU, as `cuda_on_cpu` does stream.cu."""

from __future__ import annotations

import re
import struct

import pytest

import cuda_on_cpu
from kbit.backends.cuda import driver, tensor_map
from kbit.backends.cuda.compiler import KernelSpec

PATTERNS = (
    (r"const __grid_constant__ TensorMap (\w+)", r"const TensorMap& \1"),
    (r"\bmultiply_onto\(", "multiply_onto<Config::bf16, Config::tokens>("),
)


def host_source(spec: KernelSpec) -> str:
    """C++ with a function `run`, of a configuration of wgmma.cu or nvfp4_exact_wgmma.cu."""
    source = cuda_on_cpu.translated(spec.source, set())
    for pattern, replacement in PATTERNS:
        source = re.sub(pattern, replacement, source)
    return cuda_on_cpu.with_run(spec, source, "cuda_wgmma_on_cpu.h", True)


def install(
    monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels, limits: driver.DeviceLimits
) -> None:
    """Let wgmma.py take CPU tensors; tensor maps are what cuda_wgmma_on_cpu.h reads."""
    cuda_on_cpu.install(monkeypatch, kernels, limits)
    monkeypatch.setattr(tensor_map, "_encode", _encode)


def _encode(
    device: int | None,
    address: int,
    rows: int,
    columns: int,
    stride: int,
    kind: str,
    box_rows: int,
    box_columns: int,
    swizzle: str,
) -> bytes:
    element = 4 if kind == "UINT32" else 2
    fields = (address, rows, columns, stride, element, box_rows, box_columns, int(swizzle == "128B"))
    return struct.pack("16Q", *fields, *(0,) * 8)
