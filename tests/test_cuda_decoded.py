"""Decode + cuBLAS: chunks of rows, and results whose rows are not aligned, on the CPU."""

from __future__ import annotations

import pytest
import torch

from kbit.backends.cuda import decoded


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [8, 16, 1000])
@pytest.mark.parametrize(("n", "k"), [(1, 24), (7, 24), (8, 21), (20, 24), (33, 19), (16, 1)])
def test_any_number_of_rows_and_columns(n, k, chunk_rows, with_bias, dtype, monkeypatch):
    monkeypatch.setattr(decoded, "GPU_CHUNK_WEIGHTS", chunk_rows * 24 + 5)
    torch.manual_seed(n)
    x, w = torch.randn(5, k).to(dtype), torch.randn(n, k).to(dtype)
    bias = torch.randn(n).to(dtype) if with_bias else None
    written = torch.zeros(n)

    def decode(first, rows):
        rows.copy_(w[first : first + len(rows)])
        written[first : first + len(rows)] += 1

    multiplied = []
    real = torch.mm, torch.addmm
    monkeypatch.setattr(torch, "mm", lambda *a, out: multiplied.append((*a, out)) or real[0](*a, out=out))
    monkeypatch.setattr(torch, "addmm", lambda *a, out: multiplied.append((*a, out)) or real[1](*a, out=out))
    out = torch.full((5, n), float("nan"), dtype=dtype)
    decoded._multiply(x, decode, bias, out)
    assert bool((written == 1).all())
    want = x.double() @ w.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), want, rtol=2e-2, atol=2e-2)
    for *_, x_now, w_now, y in multiplied if dtype != torch.float32 else ():
        assert all(max(tensor.stride()) % 8 == 0 for tensor in (x_now, w_now, y))
        assert all(tensor.storage_offset() % 8 == 0 for tensor in (x_now, w_now, y))
