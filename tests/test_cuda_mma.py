"""csrc/mma.cu on any GPU that kernels run on: every launch, every number of tokens, the same bits again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kbit
from kbit.backends.cuda import driver, mma, mma_config
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import SUPPORTED_BITS
from test_cuda_wgmma import K, N, expected, operands  # 38 row tiles, which fill no block

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def plans(m, bits, gated=False):
    """A launch of every configuration that fits, also of GPUs with less memory; K in 1, 2 and 4 parts."""
    limits = driver.device_limits(torch.cuda.current_device())
    weight = WeightShape(N, K, bits, gated, limits)
    sizes = {min(limits.shared_bytes, kib * 1024) for kib in (99, 163, 227)}
    configs = {config for size in sizes for config in mma_config.configs(bits, True, size)}
    for config in sorted(configs):
        for parts in (1, 2, 4):
            yield mma.Plan(config, (mma._row_blocks(config, weight), -(-m // config.tokens), parts))


def run(x, q, plan, bias=None, gated=False):
    """A launch into a poisoned result."""
    out = torch.full((x.shape[0], N // 2 if gated else N), torch.nan, device="cuda", dtype=x.dtype)
    mma.linear(x, q.tile().tiled, q.codebook, q.scale, bias, N, K, gated, out, plan)
    return out


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_launch(bits, dtype):
    for m in (5, 130):
        x, q, bias = operands(m, bits, dtype)
        exact, bound = expected(x, q, bias)
        gates, ups = expected(x, q)[0].to(dtype).chunk(2, dim=1)
        activated = F.silu(gates.double()).to(dtype).double() * ups.double()
        for plan in plans(m, bits):
            y = run(x, q, plan, bias)
            assert bool(((y.double() - exact).abs() <= bound).all()), plan
            y = run(x, q, plan, gated=True).double()
            atol = 0.05 * float(activated.abs().mean())
            torch.testing.assert_close(y, activated, rtol=0.05, atol=atol)


def test_every_number_of_tokens(monkeypatch):
    """From 1 to 300, so that every edge of a tile is crossed."""
    monkeypatch.setenv("KBIT_KERNEL", "mma")
    x, q, bias = operands(300, 4, torch.bfloat16)
    exact, bound = expected(x, q, bias)
    q = q.tile()
    for m in range(1, 301):
        out = torch.full((m, N), torch.nan, device="cuda", dtype=x.dtype)
        kbit.linear(x[:m], q, bias, out=out)
        assert bool(((out.double() - exact[:m]).abs() <= bound[:m]).all()), m


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize(("n", "k"), [(48, 128), (17, 33), (2048, 1024), (640, 5216)])
def test_products_of_single_ones_are_the_weights(n, k, bits, monkeypatch):
    monkeypatch.setenv("KBIT_KERNEL", "mma")
    q = kbit.quantize(torch.randn(n, k, device="cuda"), bits, search=False)
    for m in (1, 17, 64, 300):
        at = torch.randint(k, (m,), device="cuda")
        y = kbit.linear(F.one_hot(at, k).half(), q)
        assert torch.equal(y, kbit.dequantize(q, torch.float16)[:, at].T), m


def test_repeated_runs_are_bit_identical_on_a_busy_gpu():
    noise, busy = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    for bits in SUPPORTED_BITS:
        x, q, bias = operands(200, bits, torch.float16)
        q = q.tile()
        for plan in plans(200, bits):
            first = run(x, q, plan, bias)
            differing = torch.zeros((), dtype=torch.int64, device="cuda")
            torch.cuda.synchronize()
            for _ in range(200):
                with torch.cuda.stream(busy):
                    torch.mm(noise, noise)
                differing += (run(x, q, plan, bias).view(torch.int16) != first.view(torch.int16)).sum()
            assert int(differing) == 0, plan
