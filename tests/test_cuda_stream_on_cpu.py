"""What csrc/stream.cu computes of a group of NVFP4 tiles, run on the CPU: table, scales, operands, sums."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch

import cuda_on_cpu
from kbit.backends.cuda import stream
from kbit.backends.cuda.nvfp4.tiled import CODEBOOK
from kbit.format import nvfp4_layout
from kbit.nvfp4 import reference

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

RUN = """
extern "C" void run(const u8* group, const float* codebook, const u16* x, const u8* x_scales, int m, int k,
                    float* out) {
    const int grid[3] = {1, 1, 1};
    launch(grid, 32, D::kTableBytes + kGroupBytes, 1, true, [=] {
        const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
        D::fill(block_memory(), D::level<kScaleWeights>(codebook, lane), lane, 32);
        if (lane == 0) std::memcpy(block_memory() + D::kTableBytes, group, kGroupBytes);
        __syncwarp();
        Problem p{};
        p.m = m;
        p.k = k;
        Activations activations;
        activations.load({x, x_scales, k}, 0, p, lane);
        const D decode(block_memory(), lane);
        Sums sums = {};
        multiply_nvfp4<true>(sums, decode, activations, D::kTableBytes, lane);
        for (int i = 0; i < kSums; ++i) {
            float sum = sum_at(sums, i) * (kScaleWeights ? 1.0f : S::kUnit);
            if (kOne) for (int step = 1; step < 4; step *= 2) sum += exchange(sum, lane ^ step);
            const int token = kOne ? 0 : i / 4 * 8 + 2 * t + i % 2, row = g + (kOne ? i : i / 2 % 2) * 8;
            if (token < m && (!kOne || t == 0)) out[token * 16 + row] = sum;
        }
    });
}
"""


def compiled(folder: Path, tokens: int, dtype: torch.dtype, coded: bool) -> ctypes.CDLL:
    config = stream.Config(8, 2).spec(4, dtype, tokens, nvfp4=True, coded=coded).config_header
    text = cuda_on_cpu.translated("stream_nvfp4.cuh", set())
    source, library = folder / "stream.cpp", folder / "stream.so"
    header = '#include "cuda_on_cpu.h"'
    source.write_text("\n".join([header, config.replace("#pragma once", ""), text, RUN]))
    flags = (*cuda_on_cpu.FLAGS, f"-I{cuda_on_cpu.HERE}", "-o", str(library))
    done = subprocess.run([cuda_on_cpu.COMPILER, *flags, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, re.sub(r"(?s)(.{4000}).*", r"\1", done.stderr)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "coded"), [(1, False), (1, True), (8, False), (8, True), (16, False)])
def test_a_group_times_activations(tmp_path: Path, tokens: int, dtype: torch.dtype, coded: bool) -> None:
    """One-hot activations give decoded weights, all of them; others sums within float32's rounding."""
    made = torch.Generator().manual_seed(tokens)
    codes = torch.randint(0, 256, (16, 128), generator=made, dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (16, 16), generator=made, dtype=torch.uint8)
    group = nvfp4_layout.to_tiled(codes, scales)
    codebook = torch.tensor(CODEBOOK)
    w = reference.dequantize(codes, scales, 1.0, None, torch.float32)
    run = compiled(tmp_path, tokens, dtype, coded).run

    def product(x: torch.Tensor, x_scales: torch.Tensor | None = None) -> torch.Tensor:
        x = x.to(dtype).contiguous() if x_scales is None else x.contiguous()
        out = torch.full((x.shape[0], 16), float("nan"))
        addresses = (t.data_ptr() if t is not None else 0 for t in (group, codebook, x, x_scales))
        run(*map(ctypes.c_void_p, addresses), x.shape[0], 256, ctypes.c_void_p(out.data_ptr()))
        return out

    one_hot = 6 * torch.eye(256)  # six is a level, so NVFP4 has it exactly
    for first in range(0, 256, 37 if tokens == 1 else tokens):
        rows = one_hot[first : first + tokens]
        ones = reference.quantize(rows, False, False, 1.0) if coded else (rows,)
        assert torch.equal(product(*ones) + 0.0, 6 * w[:, first : first + len(rows)].t() + 0.0), first
    count = max(1, tokens - 1)
    if coded:  # any bytes at all
        raw = [torch.randint(0, 256, (count, n), generator=made, dtype=torch.uint8) for n in (128, 16)]
        x, have = reference.dequantize(*raw, 1.0, None, torch.float32), product(*raw)
    else:
        x = torch.randn(count, 256, generator=made).to(dtype)
        have = product(x)
    want = x.double() @ w.double().t()
    bound = (x.double().abs() @ w.double().abs().t()) * 64 * 2.0**-23
    assert bool(((have.double() - want).abs() <= bound).all())
