"""csrc/stream.cu, whole, run on the CPU: rings, hand-overs, several passes, gates and ragged sizes."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import kbit
from kbit.backends.cuda import driver, stream

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

# (N, K): several rows of tiles a block; more groups than workers, the last one ragged; a single row of tiles.
SIZES = [(72, 200), (40, 2600), (9, 333)]
# A machine so small that blocks have several rows of tiles.
LIMITS = driver.DeviceLimits(multiprocessors=2, shared_bytes=227 * 1024, arch="90a")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("stream_on_cpu"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)
    monkeypatch.setattr(driver, "device_limits", lambda index: LIMITS)


def check(m: int, n: int, k: int, bits: int, dtype: torch.dtype, gated: bool = False) -> None:
    made = torch.Generator().manual_seed(m + n + k + bits)
    rows = 2 * (n // 16 * 16) if gated else n
    q = kbit.quantize(torch.randn(rows, k, generator=made), bits=bits, search=False)
    w = kbit.dequantize(q, torch.float32).double()
    tiled = q.tile().tiled
    x = torch.randn(m, k, generator=made).to(dtype)
    bias = torch.randn(rows, generator=made).to(dtype)
    y = torch.full((m, rows // 2 if gated else rows), float("nan"), dtype=dtype)
    stream.linear(x, tiled, q.codebook.float(), q.scale.float(), bias, rows, k, gated, y)
    want = x.double() @ w.t() + bias.double()
    # Levels are rounded to 16 bits before they meet the scale; the result is rounded once.
    eps = torch.finfo(dtype).eps
    bound = (x.double().abs() @ w.abs().t()) * (eps + k**0.5 * 2.0**-23) + want.abs() * eps
    if gated:
        (gate, up), (of_gate, of_up) = want.chunk(2, dim=1), bound.chunk(2, dim=1)
        want = torch.nn.functional.silu(gate) * up
        bound = 1.2 * of_gate * up.abs() + gate.abs() * of_up + 4 * eps * want.abs() + eps
    wrong = (y.double() - want).abs() > bound
    assert not bool(wrong.any()), (wrong.nonzero()[:4].tolist(), int(wrong.sum()), y.numel())


@pytest.mark.parametrize("m", [1, 5, 16, 20])
def test_every_class_of_tokens(m: int) -> None:
    for n, k in SIZES:
        check(m, n, k, 4, torch.float16)


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_other_widths(bits: int) -> None:
    for m in (1, 2, 4, 8):
        check(m, *SIZES[0], bits, torch.bfloat16)


@pytest.mark.parametrize("m", [1, 2, 4, 8])
def test_gates(m: int) -> None:
    for n, k in SIZES[:2]:
        check(m, n, k, 4, torch.float16, gated=True)
