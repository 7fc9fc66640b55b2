"""csrc/wgmma.cu run on the CPU: every tiling, clusters and pairs of blocks, teams, gates, experts, edges."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import cuda_on_cpu
import cuda_wgmma_on_cpu
import kbit
from codebooks import asymmetric
from kbit.backends.cuda import driver, wgmma, wgmma_config
from kbit.backends.cuda.nvfp4.tiled import CODEBOOK
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import nvfp4_layout
from kbit.nvfp4 import reference

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

# A machine so small that blocks have several tiles, and clusters split what is left.
LIMITS = driver.DeviceLimits(multiprocessors=4, shared_bytes=227 * 1024, arch="90a")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("wgmma_on_cpu"), cuda_wgmma_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_wgmma_on_cpu.install(monkeypatch, kernels, LIMITS)


def check(
    m: int,
    n: int,
    k: int,
    bits: int = 4,
    dtype: torch.dtype = torch.float16,
    gated: bool = False,
    chosen: wgmma.Plan | None = None,
    codebook: str | torch.Tensor = "nf",
) -> None:
    made = torch.Generator().manual_seed(m + n + k + bits)
    q = kbit.quantize(torch.randn(n, k, generator=made), bits=bits, codebook=codebook, search=False)
    x = torch.randn(m, k, generator=made).to(dtype)
    bias = torch.randn(n, generator=made).to(dtype)
    around = torch.full((m + 2, n // 2 if gated else n), 7.0, dtype=dtype)
    y = around[1:-1].fill_(float("nan"))
    parts = (q.tile().tiled, q.codebook.float(), q.scale.float(), bias, n, k, gated)
    wgmma.linear(x, *parts, y, chosen)
    assert bool((around[[0, -1]] == 7).all())
    cuda_on_cpu.require_product(y, x, kbit.dequantize(q, torch.float32).double(), bias, gated)


def plans(m: int, n: int, k: int, gated: bool = False) -> list[wgmma.Plan]:
    """Every launch that may take a problem, the smallest clusters first."""
    known = wgmma.candidates(m, WeightShape(n, k, 4, gated, LIMITS))
    return sorted(known, key=lambda plan: (plan.tiling.cluster, plan.tiling.tokens, str(plan)))


# Ragged rows, columns and tokens; more tiles than blocks for narrow tilings.
@pytest.mark.parametrize("part", range(4))
def test_every_tiling(part: int) -> None:
    for chosen in plans(88, 136, 328)[part::4]:
        check(88, 136, 328, chosen=chosen)


def test_clusters_split_what_is_left() -> None:
    clusters = {plan.tiling.cluster: plan for plan in plans(40, 264, 1096)}
    assert {2, 3, 4} <= set(clusters)
    for cluster in (2, 3, 4):
        check(40, 264, 1096, chosen=clusters[cluster])


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (17, 9, 33), (65, 130, 64), (20, 1000, 72), (9, 17, 576)]
)
def test_small_and_ragged(m: int, n: int, k: int) -> None:
    check(m, n, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [2, 3, 5])
def test_other_widths(bits: int, dtype: torch.dtype) -> None:
    check(20, 72, 200, bits, dtype)
    check(150, 136, 264, bits, dtype)


def test_codebooks_that_are_not_symmetric() -> None:
    check(20, 72, 200, 5, codebook=asymmetric(5))
    check(150, 136, 264, 5, torch.bfloat16, codebook=asymmetric(5))


@pytest.mark.parametrize("m", [20, 70, 150, 260])
def test_gates(m: int) -> None:
    check(m, 192, 200, gated=True)
    check(m, 64, 584, dtype=torch.bfloat16, gated=True)


@pytest.mark.parametrize(("m", "n", "k"), [(20, 72, 192), (150, 136, 320)])
def test_nvfp4_with_factors_of_rows(m: int, n: int, k: int) -> None:
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 0x7F, (n, k // 16), dtype=torch.uint8)
    w = reference.dequantize(codes, scales, 1.0, None, torch.float32)
    x, factors, y = torch.randn(m, k).half(), torch.rand(m) + 0.5, torch.empty(m, n).bfloat16()
    tiled = nvfp4_layout.to_tiled(codes, scales).view(torch.int32)
    parts = (tiled, torch.tensor(CODEBOOK), torch.ones(1), None, n, k, False)
    wgmma.linear(x.bfloat16(), *parts, y, row_scale=factors)
    want = x.bfloat16().double() @ w.double().T * factors[:, None]
    bound = (x.double().abs() @ w.double().abs().T) * factors[:, None] * 64 * 2.0**-23
    assert bool(((y.double() - want).abs() <= bound + want.abs() * 2.0**-8).all())


@pytest.mark.parametrize("dealing", [(20, 0, 3), (0, 33), (1, 1, 1, 40), (30, 35, 0, 65)], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_experts(dealing: Sequence[int], gated: bool) -> None:
    experts, rows, n, k = len(dealing), sum(dealing), 96, 200
    q = kbit.quantize(torch.randn(experts, n, k), bits=4, search=False)
    w, x = kbit.dequantize(q, torch.float32).double(), torch.randn(rows, k).half()
    offsets = torch.tensor([0, *dealing]).cumsum(0).int()
    around = torch.full((rows + 2, n // 2 if gated else n), 7.0, dtype=torch.float16)
    y = around[1:-1].fill_(float("nan"))
    parts = (q.tile().tiled, q.codebook.float(), q.scale.float(), offsets, n, k, gated)
    wgmma.grouped_linear(x, *parts, y)
    assert bool((around[[0, -1]] == 7).all())
    for expert in range(experts):
        mine = slice(int(offsets[expert]), int(offsets[expert + 1]))
        cuda_on_cpu.require_product(y[mine], x[mine], w[expert], None, gated)


# Few tiles, which leave a team without any, and several for each.
@pytest.mark.parametrize("dealing", [(3,), (20, 0, 44), (70, 1), (5,) * 10], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_experts_by_two_teams(dealing: Sequence[int], gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in wgmma_config.grouped_blocks(4, gated):
        if block.teams > 1:
            monkeypatch.setattr(wgmma_config, "grouped_blocks", lambda bits, gated, block=block: [block])
            wgmma.grouped_plan.cache_clear()
            test_experts(dealing, gated)
    wgmma.grouped_plan.cache_clear()


@pytest.mark.parametrize(
    "offsets", [[0, 25, 13, 40], [0, -4, 2, 46], [3, 5, 90, 400], [40, 0, 0, 0]], ids=str
)
def test_offsets_that_say_nonsense_do_no_harm(offsets: list[int]) -> None:
    q = kbit.quantize(torch.randn(3, 40, 64), bits=4, search=False)
    around = torch.full((40 + 2, 40), 7.0, dtype=torch.float16)
    tiled, x = q.tile().tiled, torch.randn(40, 64).half()
    parts = (tiled, q.codebook.float(), q.scale.float(), torch.tensor(offsets).int(), 40, 64, False)
    wgmma.grouped_linear(x, *parts, around[1:-1])
    assert bool((around[[0, -1]] == 7).all())
