"""Mixtures of experts in NVFP4 on a GPU: sorting, grouped products, de-dup, graphs."""

from __future__ import annotations

import pytest
import torch

import nvfp4_cuda_cases as cases
from kbit.backends.cuda import nvfp4 as cuda
from kbit.nvfp4 import NVFP4Tensor, moe_gemm_nvfp4, quantize_nvfp4, reference, repack_nvfp4
from kbit.nvfp4.moe import DEDUP

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


def zipf_ids(tokens: int, choices: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Distinct experts for each token, expert e with weight 1 / (e + 1)."""
    weights = (1.0 / torch.arange(1, experts + 1)).expand(tokens, -1)
    picked = torch.multinomial(weights, choices, generator=torch.Generator().manual_seed(seed))
    return picked.int()


@pytest.mark.parametrize("tokens", [0, 7, 4096])
@pytest.mark.parametrize("experts", [1, 256])
def test_align_equals_reference(tokens: int, experts: int) -> None:
    made = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, experts + 1, (tokens, 8), generator=made).int()
    have, want = cuda.align(ids.to(DEVICE), experts), reference.align(ids, experts)
    for name, one, other in zip(("source", "slots", "bounds", "inverse"), have, want, strict=True):
        cases.assert_same(name, one, other, tokens, experts)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_combine_equals_reference(dtype: torch.dtype) -> None:
    for tokens, choices, columns in [(5, 3, 40), (32, 8, 2048), (1, 10, 17)]:
        made = torch.Generator().manual_seed(columns)
        inverse = torch.randperm(tokens * choices, generator=made).int().view(tokens, choices)
        y = cases.normal(tokens * choices, columns, dtype=dtype)
        p = torch.rand(tokens, choices, generator=made)
        have = cuda.combine(*cases.to(DEVICE, y, inverse, p))
        cases.assert_same("out", have, reference.combine(y, inverse, p), dtype, columns)


@pytest.mark.parametrize("accum", ["exact", "seq16"])
def test_grouped_products_equal_reference(accum: str) -> None:
    cases.check_moe(DEVICE, accum, 40, 128, (None, *cuda.tiles(accum)))
    cases.check_moe(DEVICE, accum, 1024, 2048, (None,))


def test_grouped_products_of_tiles_equal_reference() -> None:
    cases.check_moe_tiles(DEVICE, 40, 320, cases.ROUTINGS)
    many = [([0, 200, 3, 64, 65, 1, 127], 9), ([1, 0, 2] * 300, 0), ([0] * 1023 + [33], 2)]
    cases.check_moe_tiles(DEVICE, 150, 576, many, ["even", "steep"])
    cases.check_moe_tiles(DEVICE, 1024, 2048, [([5, 0, 40, 17], 3)])


def test_experts_in_tiles_by_16_bits() -> None:
    cases.check_moe_linear(DEVICE, 40, 80, cases.ROUTINGS)
    cases.check_moe_linear(DEVICE, 1024, 2048, [([5, 0, 40, 17], 3), ([300, 1], 0)])


def test_grouped_products_of_tiles_do_not_depend_on_timing() -> None:
    """Right behind what quantizes and sorts, many times, poisoned."""
    w = quantize_nvfp4(torch.randn(32, 256, 512, generator=torch.Generator().manual_seed(1)).to(DEVICE))
    tiled = repack_nvfp4(w, "tiled")
    xs = torch.randn(120, 300, 512, generator=torch.Generator().manual_seed(2)).bfloat16().to(DEVICE)
    ids = [zipf_ids(i % 30 * 10 + 1, 4, 32, i).to(DEVICE) for i in range(len(xs))]
    torch.cuda.synchronize()
    made = []
    for x, chosen in zip(xs, ids, strict=True):
        torch.full((len(chosen) * 4, 256), torch.nan, device=DEVICE)  # where the product's result will be
        made.append(moe_gemm_nvfp4(x[: len(chosen)], tiled, chosen, "indirect"))
    for i, (x, chosen, y) in enumerate(zip(xs, ids, made, strict=True)):
        want = moe_gemm_nvfp4(x[: len(chosen)], w, chosen, "gather")
        cases.assert_same("y", y, want.cpu(), i)


def test_grouped_products_equal_dense_ones() -> None:
    """Each expert's rows as if it were alone, under `tc` with the same tile, too."""
    ids = zipf_ids(100, 2, 6)
    source, _, bounds, _ = cuda.align(ids.to(DEVICE), 6)
    a = cases.to(DEVICE, *cases.random_matrix(100, columns=512))
    w = cases.to(DEVICE, *cases.random_matrix(6, 96, columns=512))
    factors = torch.full((6,), 0.25, device=DEVICE)
    edges = bounds.tolist()
    for accum in ("exact", "seq16", "tc"):
        y = cuda.moe_gemm(*a, source, bounds, *w, factors, None, accum, torch.float32, "tokens16")
        for e in range(6):
            rows = source[edges[e] : edges[e + 1]].long()
            operands = (a[0][rows], a[1][rows], w[0][e], w[1][e])
            alone = cuda.gemm(*operands, 0.25, None, accum, torch.float32, "tokens16")
            cases.assert_same("y", y[edges[e] : edges[e + 1]], alone, accum, e)


def experts_of(count: int, rows: int, columns: int) -> NVFP4Tensor:
    codes, scales = cases.random_matrix(count, rows, columns=columns)
    factors = torch.rand(count, generator=cases.generator()).to(DEVICE)
    return NVFP4Tensor(codes.to(DEVICE), scales.to(DEVICE), factors, (count, rows, columns))


@pytest.mark.parametrize("tokens", [1, 9, 129])
def test_every_way_to_quantize_for_experts_gives_the_same_bytes_under_tc(tokens: int) -> None:
    """The other contracts: test_nvfp4_gpu.py, against the reference."""
    w = experts_of(32, 64, 256)
    x = cases.normal(tokens, 256, dtype=torch.bfloat16).to(DEVICE)
    for ids in (zipf_ids(tokens, 8, 32), torch.full((tokens, 8), 3, dtype=torch.int32)):
        results = [moe_gemm_nvfp4(x, w, ids.to(DEVICE), dedup, "tc") for dedup in DEDUP]
        for dedup, y in zip(DEDUP[1:], results[1:], strict=True):
            cases.assert_same("y", y, results[0], tokens, dedup)


def test_a_layer_records_in_a_graph() -> None:
    """Sort, quantize, multiply, fold, multiply, combine: captured once, replayed with other inputs."""
    gate_up, down = experts_of(16, 128, 256), experts_of(16, 256, 64)
    x = cases.normal(9, 256, dtype=torch.bfloat16).to(DEVICE)
    ids, p = zipf_ids(9, 4, 16).to(DEVICE), torch.rand(9, 4, device=DEVICE)

    def layer() -> torch.Tensor:
        source, _, bounds, inverse = cuda.align(ids, 16)
        a = cuda.quantize(x, True, False, 1.0)
        factors = (gate_up.global_scale, down.global_scale)
        hidden = cuda.moe_gemm(*a, source, bounds, *gate_up.nv(), factors[0], None, "exact", torch.bfloat16)
        b = cuda.silu_mul_quantize(hidden, True, False, 1.0)
        y = cuda.moe_gemm(*b, None, bounds, *down.nv(), factors[1], None, "exact", torch.bfloat16)
        return cuda.combine(y, inverse, p)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer()
    for seed in (1, 2):
        x.copy_(cases.normal(9, 256, dtype=torch.bfloat16, seed=seed))
        ids.copy_(zipf_ids(9, 4, 16, seed))
        graph.replay()
        cases.assert_same("out", out.clone(), layer(), seed)


def test_nothing_depends_on_the_rows_beside() -> None:
    """A token's bytes are the same alone and in a batch, under the defined contracts."""
    w = quantize_nvfp4(cases.normal(512, 1024, dtype=torch.bfloat16).to(DEVICE))
    x = cases.normal(130, 1024, dtype=torch.bfloat16).to(DEVICE)
    codes, scales = cuda.quantize(x, True, False, 1.0)
    for accum in ("exact", "seq16"):
        whole = cuda.gemm(codes, scales, *w.nv(), 1.0, None, accum, torch.bfloat16)
        for row in (0, 77, 129):
            part = slice(row, row + 1)
            alone = cuda.gemm(codes[part], scales[part], *w.nv(), 1.0, None, accum, torch.bfloat16)
            cases.assert_same("y", alone, whole[part], accum, row)
