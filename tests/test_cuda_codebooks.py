"""Codebooks of 5 bits that are not symmetric around 0, which kernels decode another way."""

from __future__ import annotations

import pytest
import torch

import kbit
from codebooks import asymmetric
from kbit.backends.cuda import rows, weight_shape, wgmma
from kbit.format.symmetry import is_symmetric
from kbit.format.tensor import QuantizedTensor

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16]
BITS = 5


def quantized(*shape: int, codebook: torch.Tensor | None = None) -> QuantizedTensor:
    levels = asymmetric(BITS) if codebook is None else codebook
    return kbit.quantize(torch.randn(*shape, device="cuda"), BITS, codebook=levels, search=False)


def one_hot(m: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [m, k] with a single 1 in each row, and where."""
    at = torch.randint(k, (m,), device="cuda")
    return torch.nn.functional.one_hot(at, k).to(dtype), at


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["stream", "wgmma", "mma", "cublas"])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (17, 33), (2048, 1024), (640, 5216)])
def test_products_of_single_ones_are_the_weights(kernel, n, k, dtype, monkeypatch):
    monkeypatch.setenv("KBIT_KERNEL", kernel)
    q = quantized(n, k)
    w = kbit.dequantize(q, dtype)
    assert not is_symmetric(q.codebook)
    for m in (1, 2, 3, 4, 5, 8, 11, 16, 20, 64) + ((100, 300) if kernel != "stream" else ()):
        x, at = one_hot(m, k, dtype)
        assert torch.equal(kbit.linear(x, q), w[:, at].T), m


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", ["grouped", "resident", "wgmma", "mma"])
def test_products_of_experts(kernel, dtype, monkeypatch):
    monkeypatch.setenv("KBIT_KERNEL", kernel)
    dealing = (3, 0, 1, 40, 9)
    offsets = torch.tensor([0, *dealing], device="cuda").cumsum(0).int()
    for n, k, gated in ((512, 1024, False), (40, 333, False), (512, 2048, True)):
        q = quantized(len(dealing), n, k)
        x, _ = one_hot(sum(dealing), k, dtype)
        y = kbit.grouped_linear(x, q, offsets, activation="silu_and_mul" if gated else None)
        of_row = torch.arange(len(dealing)).repeat_interleave(torch.tensor(dealing)).cuda()
        picked = torch.einsum("mk,mnk->mn", x.float(), kbit.dequantize(q, dtype)[of_row].float())
        if gated:
            gate, up = picked.chunk(2, dim=-1)
            torch.testing.assert_close(y.float(), torch.nn.functional.silu(gate) * up, rtol=0.01, atol=1e-4)
        else:
            assert torch.equal(y, picked.to(dtype)), (n, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_to_decode_give_the_same_bits(dtype, monkeypatch):
    """Of the default codebook, by kernels for any."""
    q = quantized(768, 1056, codebook=kbit.normal_float(BITS))
    x = torch.randn(70, 1056, device="cuda").to(dtype)
    monkeypatch.setenv("KBIT_KERNEL", "wgmma")
    y, w = kbit.linear(x, q), kbit.dequantize(q.tile(), dtype)
    for module in (weight_shape, rows):
        monkeypatch.setattr(module, "is_symmetric", lambda codebook: False)
    again = torch.full_like(y, torch.nan)
    wgmma.linear(x, q.tiled, q.codebook, q.scale, None, 768, 1056, False, again)
    assert torch.equal(again, y)
    assert torch.equal(kbit.dequantize(q, dtype), w)


def test_a_graph_captures_the_first_product_of_a_codebook():
    """Nothing can be asked about it by then."""
    for levels in (asymmetric(BITS), kbit.normal_float(BITS)):
        q = quantized(96, 320, codebook=levels).tile()
        fresh = QuantizedTensor.from_tiles(q.tiled, q.codebook.clone(), q.scale, BITS, q.shape)
        x, at = one_hot(4, 320, torch.float16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = kbit.linear(x, fresh)
        graph.replay()
        assert torch.equal(y, kbit.dequantize(q, torch.float16)[:, at].T)
