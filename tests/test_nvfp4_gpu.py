"""On a GPU, through the public functions: every NVFP4 operation gives the bytes of the reference on the CPU.

The kernels alone, in more sizes: test_cuda_nvfp4.py.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from kbit.nvfp4 import (
    NVFP4Tensor,
    dequantize_nvfp4,
    gemm_nvfp4,
    moe_align,
    moe_gemm_nvfp4,
    quantize_nvfp4,
    repack_nvfp4,
    rmsnorm,
    rmsnorm_quantize_nvfp4,
    silu_mul,
    silu_mul_quantize_nvfp4,
    tiles_nvfp4,
)
from kbit.nvfp4.expert_products import expert_product
from kbit.nvfp4.formats import e2m1, ue4m3
from kbit.nvfp4.layers import NVFP4Experts, NVFP4Linear, NVFP4Settings
from kbit.nvfp4.moe import DEDUP, quantize_for_experts, route
from made_up_nvfp4 import draw, random_tensor

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
F32 = torch.float32


def same(cpu: torch.Tensor, gpu: torch.Tensor) -> bool:
    """Equal bytes, so -0 is not 0; but any NaN equals any other, whose bits devices choose."""
    gpu = gpu.cpu()
    if cpu.dtype != gpu.dtype or cpu.shape != gpu.shape:
        return False
    if cpu.is_floating_point():
        cpu, gpu = (torch.where(each.isnan(), math.nan, each) for each in (cpu, gpu))
    gpu = gpu.contiguous()
    return torch.equal(cpu.contiguous().view(-1).view(torch.uint8), gpu.view(-1).view(torch.uint8))


def same_tensor(cpu: NVFP4Tensor, gpu: NVFP4Tensor) -> bool:
    parts = zip(cpu.nv(), gpu.nv(), strict=True)
    rows = cpu.row_scale is None or (gpu.row_scale is not None and same(cpu.row_scale, gpu.row_scale))
    return rows and all(same(a, b) for a, b in parts)


def difficult_rows() -> torch.Tensor:
    """Ties of magnitudes and of scales, special values, subnormals, and many binades: float32 [rows, 16]."""
    table = ue4m3.table()[:0x7F]
    every = table[:, None] * e2m1.decode(torch.arange(16, dtype=torch.uint8))
    ties = table[:, None] * torch.tensor([*e2m1.MIDPOINTS, *(-m for m in e2m1.MIDPOINTS), 6.0, 1.0])
    middles = torch.zeros(0x7E, 16)
    middles[:, 3] = 6 * (table[1:] + table[:-1]) / 2
    spread = torch.randn(4096, 16, generator=draw(0)) * torch.exp2(torch.arange(4096) % 120 - 70)[:, None]
    special = torch.zeros(8, 16)
    for row, value in enumerate((math.nan, math.inf, -math.inf, 2.0**-149, -0.0, 3e38, 2.0**-133, 1e-44)):
        special[row, row] = value
    special[5] = 3e38
    return torch.cat([every, ties, middles, torch.nextafter(middles, every.new_tensor(9e9)), spread, special])


# -- formats and quantizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_difficult_rows(dtype: torch.dtype) -> None:
    x = difficult_rows().to(dtype)
    for search, ties in itertools.product((True, False), ("zero", "even")):
        have = quantize_nvfp4(x.cuda(), search, ties)
        assert same_tensor(quantize_nvfp4(x, search, ties), have), (search, ties)


@pytest.mark.parametrize("columns", [1, 17, 2056])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_any_columns_and_factors(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(65, columns, generator=draw(columns)).to(dtype)
    for row_scale, factor in itertools.product((False, True), (None, 0.3)):
        cpu, gpu = (quantize_nvfp4(each, row_scale=row_scale, global_scale=factor) for each in (x, x.cuda()))
        assert same_tensor(cpu, gpu)
        for out in DTYPES:
            assert same(dequantize_nvfp4(cpu, out), dequantize_nvfp4(gpu, out))


@pytest.mark.parametrize("shape", [(5, 16), (7, 272), (3, 40, 528), (1, 2048)])
def test_repack(shape: tuple[int, ...]) -> None:
    t = random_tensor(shape, 0)
    for layout in ("ggml", "mmq"):
        gpu = repack_nvfp4(t.to("cuda"), layout)
        assert same(repack_nvfp4(t, layout).codes, gpu.codes)
        assert same_tensor(t, repack_nvfp4(gpu, "nv"))


# -- products ------------------------------------------------------------------------------------------------

SHAPES = [(1, 16, 16), (7, 33, 100), (129, 64, 1040)]


@pytest.mark.parametrize("accum", ["exact", "seq16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gemm_equals_the_reference_with_every_tile(shape: tuple[int, int, int], accum: str) -> None:
    m, n, k = shape
    a, w = random_tensor((m, k), 1), random_tensor((n, k), 5)
    there = a.to("cuda"), w.to("cuda")
    for dtype in DTYPES:
        expected = gemm_nvfp4(a, w, accum, dtype)
        for tile in (None, *tiles_nvfp4(accum, "cuda")):
            assert same(expected, gemm_nvfp4(*there, accum, dtype, tile)), (dtype, tile)


@pytest.mark.parametrize("shape", [(16, 16), (33, 80), (130, 528), (1040, 2048), (96, 5120), (64, 14336)])
def test_exact_products_of_tiles_equal_those_of_the_layout_nv(shape: tuple[int, int]) -> None:
    """Every number of tokens up to two blocks of them, poisoned, many times: nothing depends on timing."""
    n, k = shape
    w = random_tensor((n, k), 5).to("cuda")
    for a in (random_tensor((70, k), 1).to("cuda"), quantize_nvfp4(torch.randn(70, k).cuda())):
        tiled, (codes, scales) = repack_nvfp4(w, "tiled"), a.nv()
        expected = gemm_nvfp4(a, w, "exact", F32).cpu()
        for m in (*range(1, 36), 64, 65, 70) * 3:
            some = NVFP4Tensor(codes[:m], scales[:m], a.global_scale, (m, k))
            torch.full((m, n), torch.nan, device="cuda")  # where the product's result will be
            assert same(expected[:m], gemm_nvfp4(some, tiled, "exact", F32)), m
        w = quantize_nvfp4(torch.randn(n, k).cuda())  # of which float32 holds longer sums


def test_exact_products_right_behind_the_quantizer() -> None:
    """The product starts while the quantizer still runs, and other products of its kind behind it."""
    w = quantize_nvfp4(torch.randn(5120, 2048, generator=draw(1)).cuda())
    tiled = repack_nvfp4(w, "tiled")
    xs = torch.randn(300, 48, 2048, generator=draw(2)).bfloat16().cuda()
    torch.cuda.synchronize()
    made = [gemm_nvfp4(quantize_nvfp4(x[: i % 48 + 1]), tiled, "exact") for i, x in enumerate(xs)]
    for i, (x, y) in enumerate(zip(xs, made, strict=True)):
        assert same(gemm_nvfp4(quantize_nvfp4(x[: i % 48 + 1]), w, "exact").cpu(), y), i


def test_gemm_of_quantized_data_with_row_scales() -> None:
    x = torch.randn(19, 512, generator=draw(0)) * 0.01
    w = quantize_nvfp4(torch.randn(48, 512, generator=draw(1)), global_scale=0.01)
    for accum in ("exact", "seq16"):
        cpu = gemm_nvfp4(quantize_nvfp4(x, row_scale=True), w, accum)
        gpu = gemm_nvfp4(quantize_nvfp4(x.cuda(), row_scale=True), w.to("cuda"), accum)
        assert same(cpu, gpu)


def test_tc_is_close_and_reproducible() -> None:
    a, w = random_tensor((33, 1024), 3), random_tensor((128, 1024), 4)
    exact = gemm_nvfp4(a, w, "exact", F32)
    largest = (dequantize_nvfp4(a).abs() @ dequantize_nvfp4(w).abs().t()) * 2.0**-18
    for tile in (None, *tiles_nvfp4("tc", "cuda")):
        first, second = (gemm_nvfp4(a.to("cuda"), w.to("cuda"), "tc", F32, tile) for _ in range(2))
        assert torch.equal(first, second)
        assert ((first.cpu() - exact).abs() <= largest).all()


def test_all_products_of_two_operands() -> None:
    codes = torch.zeros(127 * 16, 16, dtype=torch.uint8)
    codes[:, 0] = torch.arange(127 * 16) % 16
    scales = (torch.arange(127 * 16) // 16).to(torch.uint8)[:, None]
    t = NVFP4Tensor(e2m1.pack(codes), scales, torch.ones(()), (127 * 16, 16))
    for accum in ("exact", "seq16"):
        assert same(gemm_nvfp4(t, t, accum, F32), gemm_nvfp4(t.to("cuda"), t.to("cuda"), accum, F32))


def test_exact_holds_the_largest_sums() -> None:
    columns = 1 << 20
    t = NVFP4Tensor(
        torch.full((1, columns // 2), 0x77, dtype=torch.uint8),
        torch.full((1, columns // 16), 0x7E, dtype=torch.uint8),
        torch.ones(()),
        (1, columns),
    ).to("cuda")
    for tile in (None, *tiles_nvfp4("exact", "cuda")):
        assert gemm_nvfp4(t, t, "exact", F32, tile).item() == 2688.0**2 * columns


# -- experts -------------------------------------------------------------------------------------------------


def routing_ids(kind: str, tokens: int, choices: int, experts: int) -> torch.Tensor:
    if kind == "zipf":
        popularity = 1 / torch.arange(1, experts + 1).float().expand(tokens, -1)
        return torch.multinomial(popularity, choices, generator=draw(tokens)).int()
    ids = torch.randint(experts, (tokens, choices), generator=draw(tokens)).int()
    if kind == "duplicate":
        ids.zero_()
    if kind == "not mine":
        ids[torch.rand(ids.shape, generator=draw(1)) < 0.4] = experts
    return ids


@pytest.mark.parametrize("kind", ["uniform", "zipf", "duplicate", "not mine"])
@pytest.mark.parametrize("tokens", [1, 8, 33, 129])
def test_experts(tokens: int, kind: str) -> None:
    """Every way gives the same operands; products take them by sorted row ("off") and by token."""
    experts, choices, columns = 16, 4, 144
    ids = routing_ids(kind, tokens, choices, experts)
    x = torch.randn(tokens, columns, generator=draw(2)).bfloat16()
    w = random_tensor((experts, 40, columns), 3)
    for cpu, gpu in zip(moe_align(ids, experts), moe_align(ids.cuda(), experts), strict=True):
        assert same(cpu, gpu)
    routing, device_routing = route(ids, experts), route(ids.cuda(), experts)
    reference, there = quantize_for_experts(x, routing, "off"), w.to("cuda")
    products = {accum: expert_product(reference, routing, w, accum) for accum in ("exact", "seq16")}
    for dedup in DEDUP:
        a = quantize_for_experts(x.cuda(), device_routing, dedup)
        rows = slice(None) if a.rows is None else a.rows.long()
        assert same(reference.tensor.codes, a.tensor.codes[rows]), dedup
        assert same(reference.tensor.scales, a.tensor.scales[rows]), dedup
        for accum, cpu in products.items() if dedup in ("off", "indirect") else ():
            for tile in (None, *tiles_nvfp4(accum, "cuda")):
                gpu = expert_product(a, device_routing, there, accum, tile=tile)
                assert same(cpu, gpu), (dedup, accum, tile)
    y = moe_gemm_nvfp4(x, w, ids)
    assert same(y, moe_gemm_nvfp4(x.cuda(), there, ids.cuda(), "indirect"))


def test_ids_out_of_range_count_as_not_mine() -> None:
    ids = torch.tensor([[0, 9, -3], [2, 1, 4]], dtype=torch.int32)
    _, slots, bounds, inverse = moe_align(ids.cuda(), 4)
    assert bounds.tolist() == [0, 1, 2, 3, 3]
    assert slots.tolist() == [0, 4, 3, 1, 2, 5]
    assert inverse.flatten()[slots.long()].tolist() == list(range(6))


# -- folds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [30, 4104])
def test_norms(dtype: torch.dtype, columns: int) -> None:
    x, residual = (torch.randn(9, columns, generator=draw(i)).to(dtype) for i in (1, 2))
    weight = (1 + torch.randn(columns, generator=draw(3)) / 8).to(dtype)
    strided = torch.stack([weight, -weight], dim=1).cuda()[:, 0]
    for added in (None, residual):
        on_gpu = (x.cuda(), strided, 1e-6, None if added is None else added.cuda())
        norm, h = rmsnorm(x, weight, 1e-6, added)
        for cpu, gpu in zip((norm, h), rmsnorm(*on_gpu), strict=True):
            assert same(cpu, gpu)
        expected = quantize_nvfp4(norm, ties="even", global_scale=0.5)
        for write in (True, False):
            folded = rmsnorm_quantize_nvfp4(*on_gpu, write_norm=write, ties="even", global_scale=0.5)
            assert same_tensor(expected, folded.quantized)
            assert same(h, folded.residual)
            assert (folded.norm is not None) == write
            assert folded.norm is None or same(norm, folded.norm)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [1, 100])
def test_silu(dtype: torch.dtype, half: int) -> None:
    x = (torch.randn(33, 2 * half, generator=draw(half)) * 12).to(dtype)
    x[0, :2] = torch.tensor([math.nan, math.inf])
    assert same(silu_mul(x), silu_mul(x.cuda()))
    for search in (True, False):
        assert same_tensor(silu_mul_quantize_nvfp4(x, search), silu_mul_quantize_nvfp4(x.cuda(), search))


def test_silu_over_the_whole_range() -> None:
    gate = torch.cat([torch.linspace(-120, 120, 200_000), torch.randn(56_000, generator=draw(0)) * 1e-3])
    x = torch.stack([gate, torch.ones_like(gate)], dim=1)
    assert same(silu_mul(x), silu_mul(x.cuda()))


# -- layers and graphs ---------------------------------------------------------------------------------------


def test_layers_have_the_bits_of_the_cpu() -> None:
    linear = torch.nn.Linear(144, 72).bfloat16().requires_grad_(False)
    layer = NVFP4Linear.from_linear(linear, NVFP4Settings())
    x = torch.randn(5, 144, generator=draw(0)).bfloat16()
    expected = layer(x)
    assert same(expected, layer.cuda()(x.cuda()))


@pytest.mark.parametrize(
    "settings",
    [*(NVFP4Settings(dedup=dedup) for dedup in ("off", "gather", "indirect")), NVFP4Settings("16bit")],
)
def test_a_cuda_graph_records_experts(settings: NVFP4Settings) -> None:
    if settings.activations == "16bit" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("elsewhere than on Hopper W4A16 experts wait for the device")
    experts = torch.nn.Module()
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(8, 96, 64, generator=draw(0)).bfloat16())
    experts.down_proj = torch.nn.Parameter(torch.randn(8, 64, 48, generator=draw(1)).bfloat16())
    experts.act_fn = torch.nn.SiLU()
    layer = NVFP4Experts.from_experts(experts, settings).cuda()
    ids = routing_ids("zipf", 16, 4, 8).cuda()
    x, p = torch.randn(16, 64, device="cuda").bfloat16(), torch.rand(16, 4, device="cuda")
    expected = layer(x, ids, p)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer(x, ids, p)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, ids, p)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
