"""csrc/mma.cu and mma_sums.cu, run on the CPU: every configuration, parts of K, experts and ragged sizes."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import cuda_on_cpu
import kbit
from codebooks import asymmetric
from kbit.backends.cuda import driver, mma, mma_config, preference
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import SUPPORTED_BITS

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

A100 = driver.DeviceLimits(multiprocessors=108, shared_bytes=163 * 1024, arch="80")
AD102 = driver.DeviceLimits(multiprocessors=128, shared_bytes=99 * 1024, arch="89")
B200 = driver.DeviceLimits(multiprocessors=148, shared_bytes=227 * 1024, arch="100a")
DEVICES = [A100, AD102, B200]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("mma_on_cpu"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels, A100)


def weights(rows, k, bits, codebook="nf"):
    made = torch.Generator().manual_seed(rows + k + bits)
    return kbit.quantize(torch.randn(rows, k, generator=made), bits=bits, codebook=codebook, search=False)


def check(m, n, k, bits, dtype, gated=False, codebook="nf", with_bias=True, plan=None):
    rows = 2 * (n // 16 * 16) if gated else n
    q, made = weights(rows, k, bits, codebook), torch.Generator().manual_seed(m)
    x = torch.randn(m, k, generator=made).to(dtype)
    bias = torch.randn(rows, generator=made).to(dtype) if with_bias else None
    y = torch.full((m, rows // 2 if gated else rows), float("nan"), dtype=dtype)
    mma.linear(x, q.tile().tiled, q.codebook.float(), q.scale.float(), bias, rows, k, gated, y, plan)
    cuda_on_cpu.require_product(y, x, kbit.dequantize(q, torch.float32).double(), bias, gated)


def plans(m, n, k, bits, gated=False, device=A100, symmetric=True):
    """A launch of every configuration, and of the first one with K in two and four parts."""
    weight = WeightShape(n, k, bits, gated, device, symmetric)
    for config in mma_config.configs(bits, symmetric, device.shared_bytes):
        grid = mma._row_blocks(config, weight), -(-m // config.tokens)
        for parts in (1, 2, 4) if config.tokens == 32 else (1,):
            yield mma.Plan(config, (*grid, parts))


@pytest.mark.parametrize(("bits", "device"), [(2, AD102), (3, AD102), (4, A100), (5, AD102)])
def test_every_launch(bits, device):
    """Rows, columns and tokens that fill no tile; more tokens than a block has."""
    dtype = torch.bfloat16 if bits % 2 else torch.float16
    for plan in plans(37, 72, 456, bits, device=device):
        check(37, 72, 456, bits, dtype, plan=plan)


def test_gates_and_ups():
    for plan in plans(33, 96, 200, 4, gated=True):
        check(33, 48, 200, 4, torch.float16, gated=True, plan=plan)


def test_rows_of_odd_sizes():
    """Results that are stored one by one, columns that are copied to be aligned, no bias."""
    check(3, 35, 99, 4, torch.bfloat16)
    check(40, 17, 33, 3, torch.float16, with_bias=False)
    check(1, 8, 32, 2, torch.float16, with_bias=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_any_codebook_of_5_bits(dtype):
    plan = next(plans(20, 72, 200, 5, symmetric=False))
    check(20, 72, 200, 5, dtype, codebook=asymmetric(5), plan=plan)


def one_hot(rows, k, dtype):
    at = torch.arange(rows) * 7 % k
    return torch.nn.functional.one_hot(at, k).to(dtype), at


def test_products_of_single_ones_are_the_weights():
    q, dtype = weights(40, 130, 4), torch.float16
    x, at = one_hot(50, 130, dtype)
    y = torch.full((50, 40), float("nan"), dtype=dtype)
    mma.linear(x, q.tile().tiled, q.codebook.float(), q.scale.float(), None, 40, 130, False, y)
    assert torch.equal(y, kbit.dequantize(q, dtype)[:, at].T)


def test_products_of_single_ones_where_a_matrix_has_a_factor():
    """A subnormal of float16 is rounded before the factor and behind it, which may add up to a whole unit."""
    made, dtype = torch.Generator().manual_seed(7), torch.float16
    q = kbit.quantize(2e-4 * torch.randn(40, 130, generator=made), bits=4, search=False)
    assert float(q.scale) < 1
    x, at = one_hot(130, 130, dtype)
    y = torch.full((130, 40), float("nan"), dtype=dtype)
    mma.linear(x, q.tile().tiled, q.codebook.float(), q.scale.float(), None, 40, 130, False, y)
    decoded = kbit.dequantize(q, dtype)[:, at].T
    differs = y != decoded
    assert bool((decoded[differs].abs() < torch.finfo(dtype).smallest_normal).all())
    assert float((y.double() - decoded.double()).abs().max()) <= 2.0**-24


# Rows of each expert, and how many belong to none in front and behind.
DEALINGS = [([3, 0, 1, 40, 9], 0, 0), ([0, 0, 0], 2, 3), ([33] * 3, 1, 0), ([0] * 40 + [2] + [0] * 30, 0, 1)]


@pytest.mark.parametrize("dealing", DEALINGS, ids=lambda dealing: str(len(dealing[0])))
@pytest.mark.parametrize("gated", [False, True])
def test_experts(dealing, gated):
    (counts, in_front, behind), dtype, (n, k) = dealing, torch.bfloat16, (48, 72)
    experts, rows = len(counts), 2 * n if gated else n
    made = torch.Generator().manual_seed(experts)
    q = kbit.quantize(torch.randn(experts, rows, k, generator=made), 4, search=False)
    w = kbit.dequantize(q, torch.float32).double()
    offsets = torch.tensor([in_front, *counts]).cumsum(0).int()
    m = int(offsets[-1]) + behind
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(dtype)
    y = torch.full((m, n), float("nan"), dtype=dtype)
    weight = (q.tile().tiled, q.codebook.float(), q.scale.float())
    mma.grouped_linear(x, *weight, offsets, rows, k, gated, y)
    for expert in range(experts):
        own = slice(int(offsets[expert]), int(offsets[expert + 1]))
        cuda_on_cpu.require_product(y[own], x[own], w[expert], None, gated)
    assert not bool(y[:in_front].any())
    assert not bool(y[m - behind :].any())


@given(
    m=st.integers(1, 5000),
    n=st.integers(1, 9000),
    k=st.integers(1, 9000),
    bits=st.sampled_from(SUPPORTED_BITS),
    experts=st.sampled_from([0, 1, 8, 512]),
    device=st.sampled_from(DEVICES),
    symmetric=st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_every_plan_fits_the_device(m, n, k, bits, experts, device, symmetric):
    """It covers all rows and tokens, parts of K have steps, and its kernel is one that is compiled."""
    weight = WeightShape(n, k, bits, False, device, symmetric)
    plan = mma.grouped_plan(m, experts, weight) if experts else mma.plan(m, weight)
    config, (by_rows, by_tokens, parts) = plan
    assert config.shared_bytes(bits) <= device.shared_bytes
    if experts:
        assert 1 <= by_rows <= device.multiprocessors
        assert by_tokens == parts == 1
    else:
        assert by_rows * 32 * config.row_warps >= n
        assert by_tokens * config.tokens >= m
    assert parts == 1 or parts * config.slices * 64 <= k + 63 * config.slices
    known = mma_config.specs(device.shared_bytes, device.arch)
    assert set(mma.kernels_of(plan, torch.float16, weight, experts > 0)) <= set(known)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_what_is_said_of_it(device, monkeypatch):
    monkeypatch.delenv("KBIT_KERNEL", raising=False)
    words = preference.reasons(100, torch.float16, WeightShape(4096, 4096, 4, False, device))
    assert words["mma"].startswith("taken by estimate: ")
    assert " tokens" in words["mma"]
    many = preference.most_by_mma(device.arch)
    assert preference.choose(many, torch.float16, 4096, 4096, False, device.arch) == "mma"
    assert preference.choose(many + 1, torch.float16, 4096, 4096, False, device.arch) == "cublas"
