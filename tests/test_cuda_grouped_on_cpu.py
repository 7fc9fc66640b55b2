"""grouped.cu and resident.cu run on the CPU: dealings of rows, teams that split K, gates, ragged sizes."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

import cuda_on_cpu
import kbit
from codebooks import asymmetric
from kbit.backends.cuda import driver, grouped, resident
from kbit.backends.cuda.weight_shape import WeightShape

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

# A machine so small that blocks have several experts.
LIMITS = driver.DeviceLimits(multiprocessors=2, shared_bytes=227 * 1024, arch="90a")
both = pytest.mark.parametrize("kernel", [grouped, resident], ids=["grouped", "resident"])
DEALINGS = [(2, 0, 1, 5), (0, 0, 3), (9, 1, 0), (1, 1, 1, 1, 1, 1, 1), (0, 17)]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("grouped_on_cpu"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels, LIMITS)


def offsets_of(dealing: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *dealing]).cumsum(0).int()


def check(
    kernel: ModuleType,
    dealing: Sequence[int],
    n: int,
    k: int,
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    gated: bool = False,
    gathered: bool = False,
    codebook: str | torch.Tensor = "nf",
) -> None:
    made = torch.Generator().manual_seed(n + k + bits + sum(dealing))
    experts, rows = len(dealing), sum(dealing)
    q = kbit.quantize(torch.randn(experts, n, k, generator=made), bits, codebook=codebook, search=False)
    w = kbit.dequantize(q, torch.float32).double()
    tiled = q.tile().tiled
    x = torch.randn(rows, k, generator=made).to(dtype)
    source = torch.randperm(rows, generator=made).int() if gathered else None
    offsets = offsets_of(dealing)
    y = torch.full((rows, n // 2 if gated else n), float("nan"), dtype=dtype)
    parts = (tiled, q.codebook.float(), q.scale.float(), offsets, source, n, k, gated)
    kernel.linear(x, *parts, y)
    if kernel is grouped:
        early = torch.full_like(y, float("nan"))
        grouped.linear(x, *parts, early, settled=True)
        assert torch.equal(early, y)
    x = x if source is None else x[source.long()]
    for expert in range(experts):
        mine = slice(int(offsets[expert]), int(offsets[expert + 1]))
        cuda_on_cpu.require_product(y[mine], x[mine], w[expert], gated=gated)


def test_blocks_of_24_warps_have_whole_teams() -> None:
    """Of three units for two blocks, 16 warps could take one; the other 8 would be none's."""
    check(grouped, (1,), 96, 2048, bits=2)


@both
@pytest.mark.parametrize("dealing", DEALINGS, ids=str)
@pytest.mark.parametrize("gathered", [False, True])
def test_any_dealing(kernel: ModuleType, dealing: Sequence[int], gathered: bool) -> None:
    for n, k in ((72, 200), (9, 333)):
        check(kernel, dealing, n, k, gathered=gathered)


@both
def test_dozens_of_experts_in_a_block(kernel: ModuleType) -> None:
    check(kernel, (1, 0, 2, 0, 0) * 18, 9, 64)


@both
@pytest.mark.parametrize("dealing", [(40, 3), (16, 16), (12, 0, 20)], ids=str)
def test_sixteen_rows_at_a_time(kernel: ModuleType, dealing: Sequence[int]) -> None:
    weight = WeightShape(72, 200, 4, False, LIMITS)
    chosen = kernel.plan(sum(dealing), len(dealing), weight)
    assert chosen is not None
    assert chosen.tokens == 16
    check(kernel, dealing, 72, 200)
    check(kernel, dealing, 64, 200, gated=True)


@both
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_every_width(kernel: ModuleType, bits: int, dtype: torch.dtype) -> None:
    check(kernel, (2, 0, 1, 5), 72, 200, bits, dtype)
    check(kernel, (3, 1), 64, 320, bits, dtype, gated=True)


@both
def test_codebooks_that_are_not_symmetric(kernel: ModuleType) -> None:
    check(kernel, (2, 0, 1, 5), 72, 200, 5, codebook=asymmetric(5))
    check(kernel, (40, 3), 64, 320, 5, torch.bfloat16, gated=True, codebook=asymmetric(5))


@both
@pytest.mark.parametrize(("n", "k", "dealing"), [(16, 2048, (1, 2)), (32, 1100, (3,)), (32, 1990, (0, 9))])
@pytest.mark.parametrize("gated", [False, True])
def test_teams_that_split_k(kernel: ModuleType, n: int, k: int, dealing: Sequence[int], gated: bool) -> None:
    rows = 2 * n if gated else n
    chosen = kernel.plan(sum(dealing), len(dealing), WeightShape(rows, k, 4, gated, LIMITS))
    assert chosen is not None
    assert chosen.span > 1
    check(kernel, dealing, rows, k, gated=gated)


@pytest.mark.parametrize(
    ("n", "k", "bits", "warps", "span"),
    [
        (320, 512, 4, 16, 1),
        (320, 1024, 4, 16, 2),
        (320, 2048, 4, 16, 2),
        (640, 512, 3, 24, 1),
        (480, 512, 2, 16, 1),  # two turns of either
        (480, 1024, 2, 24, 2),
    ],
)
def test_teams_that_take_several_turns(n: int, k: int, bits: int, warps: int, span: int) -> None:
    dealing = (1, 2, 1, 0, 3)
    chosen = grouped.plan(sum(dealing), len(dealing), WeightShape(n, k, bits, False, LIMITS))
    assert chosen is not None
    assert (chosen.config.warps, chosen.span) == (warps, span)
    assert n // 32 * 4 > warps * LIMITS.multiprocessors  # units of experts that have rows, and warps
    check(grouped, dealing, n, k, bits)


@pytest.mark.parametrize(("arch", "kilobytes"), [("80", 163), ("89", 99)])
@pytest.mark.parametrize("bits", [2, 4, 5])
def test_other_machines(arch: str, kilobytes: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = driver.DeviceLimits(multiprocessors=2, shared_bytes=kilobytes * 1024, arch=arch)
    monkeypatch.setattr(driver, "device_limits", lambda index: limits)
    check(grouped, (2, 0, 1, 5), 72, 200, bits)


@both
@pytest.mark.parametrize(
    "offsets", [[0, 5, 3, 8], [0, -4, 2, 6], [3, 5, 90, 400], [2, 2, 2, 6], [8, 0, 0, 0]], ids=str
)
def test_offsets_that_say_nonsense_do_no_harm(kernel: ModuleType, offsets: list[int]) -> None:
    q = kbit.quantize(torch.randn(3, 40, 64), bits=4, search=False)
    around = torch.full((8 + 2, 40), 7.0, dtype=torch.float16)
    tiled, x = q.tile().tiled, torch.randn(8, 64).half()
    parts = (tiled, q.codebook.float(), q.scale.float(), torch.tensor(offsets).int(), None, 40, 64, False)
    kernel.linear(x, *parts, around[1:-1])
    assert bool((around[[0, -1]] == 7).all())


@both
def test_rows_of_no_expert_are_zero(kernel: ModuleType) -> None:
    q = kbit.quantize(torch.randn(2, 40, 64), bits=4, search=False)
    x, y = torch.randn(9, 64).half(), torch.full((9, 40), float("nan"), dtype=torch.float16)
    offsets = torch.tensor([2, 4, 6]).int()
    parts = (q.tile().tiled, q.codebook.float(), q.scale.float(), offsets, None, 40, 64, False)
    kernel.linear(x, *parts, y)
    assert bool((y[[0, 1, 6, 7, 8]] == 0).all())
    assert bool((y[2:6] != 0).any())
