"""Decode + cuBLAS: chunks of rows, and results whose rows are not aligned, on the CPU."""

from __future__ import annotations

import pytest
import torch

import kbit
from kbit import nvfp4
from kbit.backends.cuda import decoded
from kbit.backends.reference import products


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [8, 16, 1000])
@pytest.mark.parametrize(("n", "k"), [(1, 24), (7, 24), (8, 21), (20, 24), (33, 19), (16, 1), (9, 4100)])
def test_any_number_of_rows_and_columns(n, k, chunk_rows, with_bias, dtype, monkeypatch):
    monkeypatch.setattr(decoded, "GPU_CHUNK_WEIGHTS", chunk_rows * max(k, 24) + 5)
    torch.manual_seed(n)
    x, w = torch.randn(5, k).to(dtype), (torch.randn(n, k) / max(k / 24, 1) ** 0.5).to(dtype)
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
        assert x_now.shape[1] == w_now.shape[0]
        assert k <= 4096 or x_now.shape[1] % 128 == 0
        assert all(max(tensor.stride()) % 8 == 0 for tensor in (x_now, w_now, y))
        assert all(tensor.storage_offset() % 8 == 0 for tensor in (x_now, w_now, y))


def test_columns_of_whole_steps():
    assert [products.whole_steps(k) for k in (0, 1, 4096, 4097, 4224, 13448)] == [
        0,
        1,
        4096,
        4224,
        4224,
        13568,
    ]
    x = torch.randn(2, 5000)
    assert products.in_whole_steps(x, x)[1] is x  # on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("k", [11528, 12808, 13444, 14792, 23056])
def test_no_column_is_left_out(k, n, dtype, monkeypatch):
    """cuBLAS leaves out the last columns of such K; by all ways that lead to it."""
    monkeypatch.setenv("KBIT_KERNEL", "cublas")
    x, w = torch.zeros(12, k, dtype=dtype, device="cuda"), torch.ones(n, k, device="cuda")
    x[:, -4:] = 1
    assert kbit.linear(x, kbit.quantize(w)).eq(4).all()
    assert kbit.linear(x, kbit.quantize(w, scale="float16")).eq(4).all()
    fed = torch.zeros(12, n, dtype=dtype, device="cuda", requires_grad=True)
    kbit.linear(fed, kbit.quantize(w.T.contiguous())).backward(x)
    assert fed.grad.eq(4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("k", [11536, 13456, 23056])
def test_no_column_is_left_out_of_nvfp4(k, n, dtype):
    x, w = torch.zeros(12, k, dtype=dtype, device="cuda"), torch.ones(n, k, device="cuda")
    x[:, -4:] = 1
    w = nvfp4.quantize_nvfp4(w)
    want = x.float() @ nvfp4.dequantize_nvfp4(w).T
    assert want.min() > 3
    for y in (nvfp4.linear_nvfp4(x, w), nvfp4.linear_nvfp4(x.clone().requires_grad_(), w)):
        torch.testing.assert_close(y.float(), want, rtol=0.01, atol=0)
    a = nvfp4.quantize_nvfp4(x)
    want = nvfp4.dequantize_nvfp4(a) @ nvfp4.dequantize_nvfp4(w).T
    for accum in ("tc", "seq16", "exact"):
        torch.testing.assert_close(nvfp4.gemm_nvfp4(a, w, accum, dtype).float(), want, rtol=0.01, atol=0)
