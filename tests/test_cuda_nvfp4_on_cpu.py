"""The NVFP4 CUDA sources, run on the CPU, give the reference's bytes: indices, arithmetic, launches."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_wgmma_on_cpu
import nvfp4_cuda_cases as cases
from kbit.backends import reference
from kbit.backends.cuda import driver, wgmma, wgmma_config
from kbit.backends.cuda.compiler import KernelSpec
from kbit.backends.cuda.nvfp4 import constants, exact, exact_wgmma, moe, products
from kbit.format import nvfp4_layout
from kbit.nvfp4 import reference as nvfp4_reference
from kbit.nvfp4.exact import fma

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

DEVICE = "cpu"
H200 = driver.DeviceLimits(multiprocessors=132, shared_bytes=227 * 1024, arch="90a")
FEW = driver.DeviceLimits(multiprocessors=2, shared_bytes=99 * 1024, arch="89")
SMALL = driver.DeviceLimits(multiprocessors=128, shared_bytes=99 * 1024, arch="89")
# So small that blocks have several tiles, and clusters split what is left.
FEW_HOPPER = driver.DeviceLimits(multiprocessors=4, shared_bytes=227 * 1024, arch="90a")
LEVELS = torch.tensor(constants.CODEBOOK)


def host_source(spec: KernelSpec) -> str:
    return (cuda_wgmma_on_cpu if "wgmma" in spec.entry else cuda_on_cpu).host_source(spec)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_on_cpu"), host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_wgmma_on_cpu.install(monkeypatch, kernels, H200)
    for module in (exact_wgmma, moe):
        monkeypatch.setattr(module, "constant", lambda values, device: LEVELS)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_quantize(dtype: torch.dtype) -> None:
    cases.check_quantize(DEVICE, dtype, [(5, 64), (3, 40), (7, 17)])


def test_quantize_beside_every_threshold() -> None:
    cases.check_thresholds(DEVICE)
    cases.check_scales(DEVICE)


def test_rows() -> None:
    cases.check_row_scale(DEVICE, [(9, 40), (7, 17), (2, 4112)])
    cases.check_dequantize(DEVICE)
    cases.check_repack(DEVICE)
    cases.check_copies(DEVICE)


def test_silu() -> None:
    cases.check_silu(DEVICE, torch.bfloat16, [32, 100])


def test_norm() -> None:
    cases.check_norm(DEVICE, torch.bfloat16, [100, 2072])


@pytest.mark.parametrize("accum", ["exact", "seq16"])
def test_products(accum: str) -> None:
    """K of one step and of several, of several splits, padded; more rows than a block; several tiles."""
    tiles = ("tokens8", "tokens64", *(["tokens8/split2"] if accum == "exact" else []))
    cases.check_gemm(DEVICE, accum, [(3, 40, 320), (20, 70, 576), (9, 24, 272)], tiles)
    cases.check_moe(DEVICE, accum, 40, 128, ("tokens8",))


@pytest.mark.parametrize("device", [SMALL, FEW])
def test_exact_products_of_tiles(device: driver.DeviceLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of tokens of a block; teams of no and of many steps; one and many row tiles of a block."""
    monkeypatch.setattr(driver, "device_limits", lambda index: device)
    shapes = [(0, 16, 64), (1, 40, 320), (2, 17, 1040), (3, 40, 320), (20, 70, 576), (9, 24, 272)]
    shapes += [(33, 17, 1040), (8, 260, 2320), (1, 260, 2320), (17, 40, 4112)]
    assert exact.plan(*shapes[-1], device).splits > 1
    cases.check_exact_tiles(DEVICE, shapes, [("any", "any")])


def test_exact_products_of_tiles_on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and tiles of K that are whole and not; one tile of y a block, and several."""
    monkeypatch.setattr(driver, "device_limits", lambda index: FEW_HOPPER)
    cases.check_exact_tiles(DEVICE, [(9, 24, 272)], cases.SPREAD_PAIRS)
    cases.check_exact_tiles(
        DEVICE, [(33, 300, 1088)], [("any", "steep"), ("steep", "steep"), ("full", "full")]
    )
    cases.check_exact_plans(DEVICE, [(40, 130, 704), (17, 520, 320)], FEW_HOPPER)


def test_exact_products_of_experts_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of tokens of a block: by the mean of rows per expert."""
    monkeypatch.setattr(driver, "device_limits", lambda index: FEW_HOPPER)
    cases.check_moe_tiles(DEVICE, 40, 320, cases.ROUTINGS)
    cases.check_moe_tiles(DEVICE, 150, 64, [([70, 0, 33, 41], 3), ([0, 0], 5)], ["any"])
    assert {exact_wgmma.grouped_tokens(count, 4) for count in (1, 60, 147)} == {16, 32, 64}


def test_experts_in_tiles_by_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "device_limits", lambda index: FEW_HOPPER)
    cases.check_moe_linear(DEVICE, 40, 80, [*cases.ROUTINGS, ([70, 0, 33, 41], 3)])
    for i, block in enumerate(wgmma_config.nvfp4_grouped_blocks()):
        cluster = 1 + i % 2
        plan = wgmma.Plan(block.tiling(cluster), 2 * cluster, block.teams)
        monkeypatch.setattr(wgmma, "grouped_plan", lambda *_, plan=plan: plan)
        cases.check_moe_linear(DEVICE, 136, 336, [([9, 0, 37], 2)])


def test_chained_products() -> None:
    cases.check_chained(DEVICE, [(3, 40, 320), (20, 70, 576)], ("tokens8",))


def test_the_largest_exact_sum() -> None:
    cases.check_largest_sum(DEVICE, 2**16)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


@pytest.mark.parametrize("tiles", [508, 509, 511])
def test_small_units_of_all_tiles_have_room(tiles: int) -> None:
    """Every tile of K leaves half a large unit, of one sign, and the last is added in four parts."""
    w, a = (torch.zeros(rows, tiles * 64, dtype=torch.uint8) for rows in (64, 16))
    w_scales, a_scales = (torch.zeros(codes.shape[0], tiles * 4, dtype=torch.uint8) for codes in (w, a))
    half, one, four, six = 1, 2, 6, 7
    first = torch.arange(tiles) * 64
    w[0, first + 32], w_scales[0, 2::4] = one, 7 << 3
    a[0, first + 32], a_scales[0, 2::4] = four, 9 << 3
    last = (tiles - 1) * 64 + torch.arange(4) * 16
    w[0, last], w_scales[0, -4:] = one, 7 << 3
    a[0, last], a_scales[0, -4:] = four, 9 << 3
    # The largest scales are of another row, and those of the last tile more than 2^8 apart.
    w[63, (first[:, None] + torch.arange(16)).flatten()], w_scales[63, 0::4] = six, 11 << 3 | 7
    w[63, first + 16], w_scales[63, 1::4], w_scales[63, -3] = half, 8 << 3, 2 << 3
    a[1], a_scales[1] = six, 9 << 3 | 7
    dense = [
        nvfp4_reference.dequantize(_packed(x), s, 1.0, None, torch.float32)
        for x, s in ((a, a_scales), (w, w_scales))
    ]
    y = torch.full((16, 64), float("nan"))
    tiled = nvfp4_layout.to_tiled(_packed(w), w_scales)
    exact_wgmma.multiply(_packed(a), a_scales, tiled, 1.0, None, y, exact_wgmma.Plan(16, 1, 1))
    assert torch.equal(y, (dense[0].double() @ dense[1].double().T).float())


def test_one_step_rounds_reciprocals_of_scales() -> None:
    """What nvfp4.cuh says of them, for starts up to 4 units in the last place away."""
    scales = torch.arange(1, 16, dtype=torch.float32)
    want = 1 / scales
    start = want
    for _ in range(4):
        start = torch.nextafter(start, torch.tensor(0.0))
    for _ in range(9):
        residual = fma(-scales, start, torch.ones_like(scales))
        cases.assert_same("inverse", fma(start, residual, start), want)
        start = torch.nextafter(start, torch.tensor(2.0))


@pytest.mark.parametrize("device", [H200, SMALL])
@pytest.mark.parametrize("accum", products.ACCUMULATIONS)
def test_every_plan_fits_the_device(device: driver.DeviceLimits, accum: str) -> None:
    for m in (1, 8, 9, 33, 4096):
        for n, k in ((16, 64), (1024, 4096), (14336, 4096), (4096, 14336)):
            for tokens in products.TOKENS:
                plan = products.plan(m, n, k, accum, tokens, None, device)
                assert plan.shared_bytes <= device.shared_bytes
                assert 2 <= plan.warps <= 8
                assert tokens == 8 or plan.warps >= 4  # which the pieces of a thread are made for
                assert plan.split == 1 or accum == "exact"


def test_tokens_of_a_tile() -> None:
    """Half as many where few blocks would run; cuBLAS from the second pass over 64 tokens on."""
    assert [products.dense_tokens(m, 14336, H200) for m in (1, 8, 9, 32, 33, 500)] == [8, 8, 16, 32, 64, 64]
    assert [products.dense_tokens(m, 5120, H200) for m in (1, 8, 9, 32, 33, 500)] == [8, 8, 16, 16, 64, 64]
    assert [products.takes_cublas(m, "tc") for m in (1, 64, 65)] == [False, False, True]
    assert not products.takes_cublas(4096, "exact")


@pytest.mark.parametrize("device", [H200, SMALL, FEW])
def test_every_plan_of_tiles_fits_the_device(device: driver.DeviceLimits) -> None:
    for m in (1, 2, 3, 8, 9, 33, 4096):
        for n, k in ((16, 64), (1024, 4096), (14336, 4096), (4096, 14336)):
            plan = exact.plan(m, n, k, device)
            assert plan.shared_bytes <= device.shared_bytes
            assert plan.threads <= 512
            assert 1 <= plan.teams <= -(-k // 256)


def test_tiles_of_experts_are_never_more_than_the_grid() -> None:
    made = torch.Generator().manual_seed(0)
    for experts in (1, 4, 40):
        for count in (1, 7, 64, 500):
            ids = torch.randint(0, experts + 1, (count,), generator=made)
            sizes = torch.bincount(ids, minlength=experts + 1)
            for tokens in products.TOKENS:
                needed = int(((sizes + tokens - 1) // tokens).sum())
                assert needed <= moe.most_tiles(count, experts, tokens)


def test_choices_beyond_what_blocks_take_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a GPU go on where as many as it runs have been launched."""
    tiny = driver.DeviceLimits(multiprocessors=1, shared_bytes=99 * 1024, arch="89")
    monkeypatch.setattr(driver, "device_limits", lambda index: tiny)
    monkeypatch.setattr(moe.routing, "moe_align", reference.moe_align)
    ids = torch.randint(3, (9001, 1), dtype=torch.int32)
    _, slots, _, inverse = moe.align(ids, 3)
    assert torch.equal(inverse.view(-1)[slots.long()], torch.arange(9001, dtype=torch.int32))
