"""Gradients in x of products with many experts, with bfloat16: at once, and in chunks of the weights."""

from __future__ import annotations

import itertools

import pytest
import torch

import kbit
from kbit.backends import reference
from kbit.backends.cuda import gradients

EXPERTS, N, K, ROWS = 6, 32, 72, 20
# Some experts have no rows, and some rows nobody, behind the last expert's or before the first one's.
OFFSETS = [[0, 3, 3, 9, 10, 17, 20], [0, 0, 0, 5, 5, 5, 5], [2, 4, 4, 9, 10, 10, 12], [0] * 7]
SIZES = [EXPERTS, 4, 1]  # experts decoded at a time


def problem(offsets, device):
    """(gradient, the weight's tensors, offsets, expected in float64)."""
    q = kbit.quantize(torch.randn(EXPERTS, N, K), bits=3).to(device).tile()
    grad = torch.randn(ROWS, N).to(device, torch.bfloat16)
    dense = kbit.dequantize(q, torch.bfloat16).double()
    expected = torch.zeros(ROWS, K, dtype=torch.float64, device=device)
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        expected[begin:end] = grad[begin:end].double() @ dense[expert]
    return grad, (q.tiled, q.codebook, q.scale), torch.tensor(offsets, dtype=torch.int32), expected


def check(found, expected):
    # bfloat16's 2^-9, and sums of 32 products in float32.
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8, atol=1e-4)
    assert not found[(expected == 0).all(1)].any()


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("each", SIZES)
def test_chunks_of_experts(each, offsets, monkeypatch):
    monkeypatch.setattr(gradients.rows, "dequantize_tiled", reference.dequantize_tiled)
    monkeypatch.setattr(gradients, "_CHUNK_WEIGHTS", each * N * K)
    grad, weight, bounds, expected = problem(offsets, "cpu")
    check(gradients.grouped_linear_tiled_grad_input(grad, *weight, bounds, N, K), expected)


@pytest.mark.parametrize("each", SIZES)
def test_offsets_beyond_the_rows_end_with_them(each, monkeypatch):
    monkeypatch.setattr(gradients.rows, "dequantize_tiled", reference.dequantize_tiled)
    monkeypatch.setattr(gradients, "_CHUNK_WEIGHTS", each * N * K)
    grad, weight, bounds, expected = problem(OFFSETS[0], "cpu")
    bounds[0], bounds[-1] = -3, ROWS + 5
    check(gradients.grouped_linear_tiled_grad_input(grad, *weight, bounds, N, K), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("each", SIZES)
def test_chunks_of_experts_on_a_gpu(each, offsets, monkeypatch):
    monkeypatch.setattr(gradients, "_CHUNK_WEIGHTS", each * N * K)
    grad, weight, bounds, expected = problem(offsets, "cuda")
    check(torch.ops.kbit.grouped_linear_tiled_grad_input(grad, *weight, bounds.cuda(), N, K), expected)


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    grad, weight, bounds, _ = problem(OFFSETS[0], "cuda")
    arguments = (grad, *weight, bounds.cuda(), N, K)
    torch.ops.kbit.grouped_linear_tiled_grad_input(*arguments)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ops.kbit.grouped_linear_tiled_grad_input(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weights", [10**9, 64 * 96])
def test_a_layer_larger_than_a_chunk(weights, dtype, device, monkeypatch):
    """What is decoded at a time changes the order of sums, not what is summed; results are rounded once."""
    q = kbit.quantize(torch.randn(200, 96), bits=4).to(device).tile()
    grad = torch.randn(5, 200).to(device, dtype)
    expected = grad.double() @ kbit.dequantize(q, dtype).double()
    for name in ("_CHUNK_WEIGHTS", "GPU_CHUNK_WEIGHTS"):
        monkeypatch.setattr(reference.products, name, weights)
    found = torch.ops.kbit.linear_tiled_grad_input(grad, q.tiled, q.codebook, q.scale, 200, 96)
    assert found.dtype == dtype
    # cuBLAS may use TF32 for float32, and may round parts of a sum whose result has 16 bits.
    exact = device == "cpu" or (dtype != torch.float32 and weights < 200 * 96)
    summed = 2.0**-16 if exact else 2.0**-8
    bound = torch.finfo(dtype).eps * expected.abs() + summed * expected.abs().max()
    assert ((found.double() - expected).abs() <= bound).all()


def test_a_float32_gradient_inside_autocast_is_float32():
    one, q = kbit.quantize(torch.randn(8, 64)), kbit.quantize(torch.randn(2, 8, 64))
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    for product in (lambda a: kbit.linear(a, one), lambda a: kbit.grouped_linear(a, q, offsets)):
        x = torch.randn(3, 64, requires_grad=True)
        (expected,) = torch.autograd.grad((product(x) * 1e5).sum(), x)
        with torch.autocast("cpu", torch.float16):
            (grad,) = torch.autograd.grad((product(x) * 1e5).sum(), x)
        assert torch.equal(grad, expected)
