"""csrc/wgmma.cu on a GPU: every launch, every number of tokens, the same bits on a busy machine."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
import torch.nn.functional as F

import kbit
from kbit import nvfp4
from kbit.backends.cuda import tensor_map, wgmma, wgmma_config
from kbit.backends.cuda.nvfp4 import tiled
from kbit.format import SUPPORTED_BITS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs Hopper"
    ),
]
CLUSTERS = range(1, 9)
TILING = wgmma_config.Tiling(32, 2)
N, K = 608, 1088  # five blocks of rows, the last in part; 17 tiles of columns


def run(x, q, plan, bias=None, gated=False):
    """A launch of wgmma into a poisoned result."""
    out = torch.full((x.shape[0], N // 2 if gated else N), torch.nan, device="cuda", dtype=x.dtype)
    return run_into(out, x, q, plan, bias, gated)


def run_into(out, x, q, plan, bias=None, gated=False):
    """A launch of wgmma, with no other kernel before it."""
    weight = (q.tile().tiled, q.codebook, q.scale, bias)
    wgmma.linear(x, *weight, N, K, gated, out, plan)
    return out


def expected(x, q, bias=None, of_weights=0.0):
    """float64 product and how far a float32 sum of K products, rounded once, may be from it.

    `of_weights`: how far the weights themselves may be from the decoded ones.
    """
    w = kbit.dequantize(q, x.dtype).double()
    exact, size = x.double() @ w.T, x.double().abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    return exact, torch.finfo(x.dtype).eps * exact.abs() + ((K + 1) * 2.0**-23 + of_weights) * size


def operands(m, bits, dtype):
    q = kbit.quantize(torch.randn(N, K, device="cuda"), bits, search=False)
    x = torch.randn(m, K, device="cuda").to(dtype)
    return x, q, torch.randn(N, device="cuda").to(dtype)


def launches(tokens, bits, nvfp4=False):
    """Clusters that have a step for each block and room for sums; as many blocks as do and do not suffice."""
    dense = [one for one in wgmma_config.configs() if one[:2] == (bits, tokens) and not one.grouped]
    for block, cluster in itertools.product(dense, CLUSTERS):
        if block.nvfp4 == nvfp4 and (cluster == 1 or (block.splits(K, cluster) and not block.multicast)):
            tiling = block.tiling(cluster)
            for clusters in (1, 2, 7):
                yield wgmma.Plan(tiling, clusters * cluster * tiling.sharers, block.teams)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("tokens", wgmma_config.TOKENS)
def test_every_launch(tokens, bits):
    """Tiles of a block, tiles that clusters split, and both in one launch; several of each."""
    dtype = torch.bfloat16 if bits % 2 else torch.float16
    x, q, bias = operands(tokens + tokens // 2 + 1, bits, dtype)
    exact, bound = expected(x, q, bias)
    gates, ups = expected(x, q)[0].to(dtype).chunk(2, dim=1)
    activated = F.silu(gates.double()).to(dtype).double() * ups.double()
    for plan in launches(tokens, bits):
        y = run(x, q, plan, bias)
        assert bool(((y.double() - exact).abs() <= bound).all()), plan
        if plan.tiling.rows != wgmma_config.ROWS:  # gated weights have no others
            continue
        y = run(x, q, plan, gated=True)
        torch.testing.assert_close(
            y.double(), activated, rtol=0.05, atol=0.05 * float(activated.abs().mean())
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", wgmma_config.TOKENS)
def test_every_launch_of_nvfp4(tokens, dtype):
    """A level times a block's scale is a 16-bit value, and the weight's own factor is applied to sums."""
    m = tokens + tokens // 2 + 1
    x, row_scale = torch.randn(m, K, device="cuda").to(dtype), torch.rand(m, device="cuda") + 0.5
    w = nvfp4.quantize_nvfp4(torch.randn(N, K, device="cuda") / 16)
    decoded = nvfp4.dequantize_nvfp4(w, torch.float32).double()
    exact, size = x.double() @ decoded.T, x.double().abs() @ decoded.abs().T
    bound = torch.finfo(dtype).eps * exact.abs() + (K + 4) * 2.0**-23 * size + 2.0**-24
    tiles = nvfp4.repack_nvfp4(w, "tiled").codes.view(torch.int32)
    codebook, scale = (tiled.constant(of, x.device) for of in (tiled.CODEBOOK, (float(w.global_scale),)))
    plans = list(launches(tokens, 4, nvfp4=True))
    assert plans
    for plan in plans:
        out = torch.full((m, N), torch.nan, device="cuda", dtype=dtype)
        wgmma.linear(x, tiles, codebook, scale, None, N, K, False, out, plan, row_scale)
        error = (out.double() - exact * row_scale[:, None]).abs()
        assert bool((error <= bound * row_scale[:, None]).all()), plan


@pytest.mark.parametrize("kernel", ["wgmma", ""])
def test_every_number_of_tokens(kernel, monkeypatch):
    """From 1 to 300, so that every edge of a tile is crossed, by wgmma and by whichever kernel is taken."""
    monkeypatch.setenv("KBIT_KERNEL", kernel)
    x, q, bias = operands(300, 4, torch.bfloat16)
    # The small-batch kernel scales sums, not weights, which are then not rounded as `dequantize` does.
    exact, bound = expected(x, q, bias, of_weights=0.0 if kernel else torch.finfo(x.dtype).eps / 2)
    q = q.tile()
    for m in range(1, 301):
        out = torch.full((m, N), torch.nan, device="cuda", dtype=x.dtype)
        kbit.linear(x[:m], q, bias, out=out)
        assert bool(((out.double() - exact[:m]).abs() <= bound[:m]).all()), m


def test_a_bias_is_what_the_kernel_in_front_writes():
    """Which may still run when this one starts: it lets its dependents start at once."""
    x, q, _ = operands(24, 4, torch.bfloat16)
    q, source = q.tile(), kbit.quantize(torch.randn(N, 16384, device="cuda"), 4, search=False).tile()
    made = torch.empty(1, N, device="cuda", dtype=x.dtype)
    for seed in range(20):
        one = torch.randn(1, 16384, device="cuda").to(x.dtype)
        wanted = run(x, q, wgmma.Plan(TILING, 10), kbit.linear(one, source)[0].clone())
        made.fill_(torch.nan)
        torch.cuda.synchronize()
        kbit.linear(one, source, out=made)
        y = run_into(torch.empty_like(wanted), x, q, wgmma.Plan(TILING, 10), made[0])
        assert torch.equal(y, wanted), seed


def test_a_thread_that_never_used_cuda():
    x, q, bias = operands(40, 4, torch.bfloat16)
    q, plan = q.tile(), wgmma.Plan(TILING, 10)
    wanted, out = run(x, q, plan, bias), torch.empty(40, N, device="cuda", dtype=x.dtype)
    tensor_map._encode.cache_clear()
    torch.cuda.synchronize()
    thread = threading.Thread(target=run_into, args=(out, x, q, plan, bias))
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("kernel", ["wgmma", "stream"])
def test_a_single_row_of_any_stride(kernel, monkeypatch):
    """It counts as contiguous, whatever the stride."""
    monkeypatch.setenv("KBIT_KERNEL", kernel)
    _, q, bias = operands(1, 4, torch.bfloat16)
    x = torch.randn(1, K + 3, device="cuda").bfloat16()[:, :K]
    assert x.is_contiguous()
    assert torch.equal(kbit.linear(x, q, bias), kbit.linear(x.flatten().clone().view(1, K), q, bias))


@pytest.mark.parametrize("tokens", wgmma_config.TOKENS)
def test_repeated_runs_are_bit_identical_on_a_busy_gpu(tokens):
    noise, busy = torch.randn(1024, 1024, device="cuda"), torch.cuda.Stream()
    x, q, bias = operands(3 * tokens + 5, 4, torch.float16)
    q = q.tile()
    for plan in launches(tokens, 4):
        first = run(x, q, plan, bias)
        differing = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        for _ in range(100):
            with torch.cuda.stream(busy):
                torch.mm(noise, noise)
            differing += (run(x, q, plan, bias).view(torch.int16) != first.view(torch.int16)).sum()
        assert int(differing) == 0, plan
