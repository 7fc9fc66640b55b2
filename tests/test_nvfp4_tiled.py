"""NVFP4 weights in tiles: where bytes are, both forms of a layer, and on a GPU the products."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from kbit.backends.cuda import stream_config, wgmma_config
from kbit.backends.cuda.nvfp4 import tiled as tiled_products
from kbit.format import bitplanes, layout, nvfp4_layout
from kbit.nvfp4 import NVFP4Tensor, dequantize_nvfp4, gemm_nvfp4, linear_nvfp4, quantize_nvfp4, repack_nvfp4
from kbit.nvfp4.formats import e2m1, layouts
from kbit.nvfp4.layers import NVFP4Experts, NVFP4Linear, NVFP4Settings
from made_up_nvfp4 import draw, random_tensor

HALVES = [torch.float16, torch.bfloat16]


# -- the layout ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(16, 64), (1, 1), (17, 80), (5, 33), (48, 1008), (3, 33, 144)])
def test_round_trip(shape: tuple[int, ...]) -> None:
    t = random_tensor(shape, 0)
    tiled = repack_nvfp4(t, "tiled")
    assert tiled.scales is None
    assert tiled.codes.shape == layouts.codes_shape(shape, "tiled")
    assert tiled.codes.shape[-1] == nvfp4_layout.TILE_BYTES
    back = repack_nvfp4(tiled, "nv")
    assert torch.equal(back.codes, t.codes)
    assert back.scales is not None
    assert t.scales is not None
    assert torch.equal(back.scales, t.scales)
    assert torch.equal(dequantize_nvfp4(tiled), dequantize_nvfp4(t))


def test_whole_tiles_are_a_permutation_of_bytes() -> None:
    t = random_tensor((32, 128), 0)
    assert t.scales is not None
    assert repack_nvfp4(t, "tiled").nbytes == t.nbytes
    both = torch.cat([t.codes.flatten(), t.scales.flatten()])
    tiles = repack_nvfp4(t, "tiled").codes.clone()
    tiles[..., 512:528] &= 0x7F  # without their marks
    assert torch.equal(tiles.flatten().sort()[0], both.sort()[0])


def test_codes_are_where_those_of_4_bits_are() -> None:
    codes = torch.randint(16, (16, 64), generator=draw(0)).to(torch.uint8)
    k_bit = layout.to_tiled(bitplanes.pack(codes, 4), torch.zeros(16, 2, dtype=torch.uint8), 4, 64)
    nvfp4 = nvfp4_layout.to_tiled(e2m1.pack(codes), torch.zeros(16, 4, dtype=torch.uint8))
    assert torch.equal(nvfp4.view(torch.int32)[..., :128], k_bit[..., :128])


@pytest.mark.parametrize(
    ("row", "column", "byte", "high"),
    [
        (0, 0, 0, False),
        (5, 3, 4 * (4 * 21), True),  # g = 5, t = 1: lane 21, pair 0, second
        (9, 14, 4 * (4 * 7) + 3, False),  # g = 1, t = 3, h = 1 + 2: pair 3
        (2, 41, 4 * (4 * 8 + 2) + 2, True),  # j = 2, h = 2: pair 10 is byte 2 of word 2
        (15, 63, 511, True),
    ],
)
def test_codes_are_where_the_text_says(row: int, column: int, byte: int, high: bool) -> None:
    codes = torch.zeros(16, 64, dtype=torch.uint8)
    codes[row, column] = 0b1011
    tile = nvfp4_layout.to_tiled(e2m1.pack(codes), torch.zeros(16, 4, dtype=torch.uint8)).flatten()
    assert tile.nonzero().flatten().tolist() == [byte]
    assert int(tile[byte]) == 0b1011 << (4 if high else 0)


@pytest.mark.parametrize(
    ("row", "block", "byte"), [(0, 0, 512), (0, 3, 515), (8, 0, 516), (3, 2, 538), (15, 3, 575)]
)
def test_scales_are_where_the_text_says(row: int, block: int, byte: int) -> None:
    scales = torch.zeros(16, 4, dtype=torch.uint8)
    scales[row, block] = 0x5A
    tile = nvfp4_layout.to_tiled(torch.zeros(16, 32, dtype=torch.uint8), scales).flatten()
    assert tile.nonzero().flatten().tolist() == [byte]


def test_scales_that_mean_zero_become_zero() -> None:
    scales = torch.tensor([[0x7F, 0x7E, 0xFF, 0x80 | 0x38]], dtype=torch.uint8)
    tiles = nvfp4_layout.to_tiled(torch.zeros(1, 32, dtype=torch.uint8), scales)
    assert nvfp4_layout.from_tiled(tiles, 1, 64)[1].tolist() == [[0, 0x7E, 0, 0x38]]


# -- products on the CPU, and layers -------------------------------------------------------------------------


@pytest.mark.parametrize("accum", ["exact", "seq16", "tc"])
def test_tiles_give_the_bytes_of_the_layout_nv(accum: str) -> None:
    a, w = random_tensor((3, 80), 1), random_tensor((33, 80), 5)
    expected = gemm_nvfp4(a, w, accum)
    assert torch.equal(gemm_nvfp4(a, repack_nvfp4(w, "tiled"), accum), expected)
    x, bias = torch.randn(2, 3, 80, generator=draw(0)), torch.randn(33, generator=draw(1))
    assert torch.equal(linear_nvfp4(x, repack_nvfp4(w, "tiled"), bias), linear_nvfp4(x, w, bias))


def test_weight_only_products_have_gradients_and_checks() -> None:
    w = repack_nvfp4(random_tensor((20, 48), 0), "tiled")
    x = torch.randn(3, 48, requires_grad=True)
    linear_nvfp4(x, w).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, dequantize_nvfp4(w).sum(0).expand(3, -1), rtol=1e-4, atol=1e-2)
    bias = torch.zeros(20, requires_grad=True)
    linear_nvfp4(x.detach(), w, bias).sum().backward()
    assert bias.grad is not None
    assert torch.equal(bias.grad, torch.full((20,), 3.0))
    for other, told in (
        (torch.zeros(2, 32), "x has 32 features, the weight expects 48"),
        (torch.zeros(()), "x has no features, the weight expects 48"),
        (torch.zeros(2, 48, device="meta"), "x is on meta, the weight on cpu"),
    ):
        with pytest.raises(ValueError, match=rf"linear_nvfp4: {told} \(up\)"):
            linear_nvfp4(other, w, where="up")
    with pytest.raises(TypeError, match="x must be float32, float16 or bfloat16, got torch.int64"):
        linear_nvfp4(torch.zeros(2, 48, dtype=torch.int64), w)
    for wrong in (bias.bfloat16(), bias[:19]):
        with pytest.raises(ValueError, match=r"bias must be torch.float32 \[20\].*\(up\)"):
            linear_nvfp4(x, w, wrong, "up")
    with pytest.raises(TypeError, match=r"bias must be a tensor, got bool \(up\)"):
        linear_nvfp4(x, w, True, where="up")
    with pytest.raises(ValueError, match="bias is on meta, the operand beside it on cpu"):
        linear_nvfp4(x, w, bias.to("meta"))


def layers(settings: NVFP4Settings, bias: bool = False) -> tuple[NVFP4Linear, NVFP4Linear]:
    """The same layer in the layout nv and in tiles."""
    torch.manual_seed(0)
    linear = nn.Linear(80, 33, bias=bias).requires_grad_(False)
    plain, tiled = (NVFP4Linear.from_linear(linear, settings) for _ in range(2))
    tiled.prepare(force=True)
    return plain, tiled


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_a_layer_computes_the_same_in_either_form_and_saves_one(activations: str) -> None:
    plain, tiled = layers(NVFP4Settings(activations=activations, accum="tc"), bias=True)
    names = {name for name, _ in tiled.named_parameters()}
    assert names == {"weight_tiled", "weight_global_scale", "bias"}
    x = torch.randn(2, 3, 80, generator=draw(0))
    assert torch.equal(tiled(x), plain(x))
    saved, expected = tiled.state_dict(), plain.state_dict()
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(saved[name], tensor), name
    assert torch.equal(tiled.weight_codes, plain.weight_codes)
    for clone in (copy.deepcopy(tiled), pickle.loads(pickle.dumps(tiled))):
        assert torch.equal(clone(x), plain(x))
    tiled.restore()
    assert {name for name, _ in tiled.named_parameters()} == {name for name, _ in plain.named_parameters()}
    assert torch.equal(tiled(x), plain(x))


def test_loading_writes_into_the_tiles_that_there_are() -> None:
    plain, tiled = layers(NVFP4Settings(accum="tc"))
    other = NVFP4Linear.from_linear(nn.Linear(80, 33, bias=False), NVFP4Settings(accum="tc"))
    place = tiled.weight_tiled.data_ptr()
    tiled.load_state_dict(other.state_dict())
    x = torch.randn(2, 80, generator=draw(0))
    assert torch.equal(tiled(x), other(x))
    assert tiled.weight_tiled.data_ptr() == place
    tiled.weight_codes = nn.Parameter(plain.weight_codes.data, requires_grad=False)
    assert "weight_tiled" not in dict(tiled.named_parameters())


@pytest.mark.parametrize(
    ("settings", "tileable"),
    [
        (NVFP4Settings(), True),
        (NVFP4Settings(accum="seq16"), False),
        (NVFP4Settings(accum="tc"), True),
        (NVFP4Settings(activations="16bit"), True),
    ],
)
def test_only_what_multiplies_tiles_changes_to_them_and_on_a_gpu(
    settings: NVFP4Settings, tileable: bool
) -> None:
    layer, _ = layers(settings)
    assert layer.tileable == tileable
    layer.prepare()
    assert "weight_codes" in dict(layer.named_parameters())


@pytest.mark.parametrize(
    ("m", "dtype", "arch", "kernel"),
    [
        (8, torch.bfloat16, "90a", "stream"),
        (9, torch.bfloat16, "90a", "wgmma"),
        (4096, torch.float16, "90a", "wgmma"),
        (64, torch.bfloat16, "89", "stream"),
        (65, torch.bfloat16, "89", None),
        (1, torch.float32, "90a", None),
    ],
)
def test_who_takes_what(m: int, dtype: torch.dtype, arch: str, kernel: str | None) -> None:
    assert (tiled_products.refusal(m, dtype, arch) is None) == (kernel is not None)
    assert kernel in (None, tiled_products.kernel(m, arch))


def test_sums_of_clusters_fit_as_in_k_bit_tiles() -> None:
    """Plans ask for k-bit tiles, of which one stage more may fit."""
    ours = [config for config in wgmma_config.configs() if config.nvfp4]
    for block, cluster in itertools.product(ours, range(2, 9)):
        assert block.splits(8192, cluster) == block._replace(nvfp4=False).splits(8192, cluster)


# -- on a GPU ------------------------------------------------------------------------------------------------

# Rows, columns, and tokens: every edge of a tile of tokens, and of a launch, with small weights.
PRODUCTS = [
    *((shape, (0, 1, 7, 8, 16, 17, 33, 64, 65, 200)) for shape in ((16, 64), (33, 80), (130, 528))),
    *((shape, (1, 8, 17, 200)) for shape in ((1, 16), (1040, 2048), (96, 5120), (64, 14336))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [64, 80, 512, 1040])
def test_one_hot_activations_return_decoded_weights(columns: int, dtype: torch.dtype) -> None:
    """Every weight, exactly, at every size of a batch that has kernels of its own."""
    w = random_tensor((33, columns), 3)
    w = NVFP4Tensor(*w.nv(), torch.ones(()), w.shape)
    codes = torch.eye(columns).mul(2).to(torch.uint8)  # 1.0
    ones = torch.full((columns, columns // 16), 0x38, dtype=torch.uint8)
    a = NVFP4Tensor(e2m1.pack(codes), ones, torch.ones(()), (columns, columns))
    expected = dequantize_nvfp4(w, dtype).t() + 0.0
    tiled = repack_nvfp4(w.to("cuda"), "tiled")
    for batch in (1, 8, 16, 33, columns):
        for first in range(0, columns, batch):
            part = slice(first, first + batch)
            rows = NVFP4Tensor(a.codes[part], ones[part], torch.ones(()), (len(a.codes[part]), columns))
            y = gemm_nvfp4(rows.to("cuda"), tiled, "tc", dtype)
            assert torch.equal(y.cpu() + 0.0, expected[part]), (batch, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "tokens"), PRODUCTS)
def test_products_are_within_their_bound_and_repeat(shape: tuple[int, int], tokens: tuple[int, ...]) -> None:
    """Float64 sums, and what K float32 additions and two roundings to the dtype may lose."""
    n, k = shape
    a, w = random_tensor((max(tokens), k), 1), random_tensor((n, k), 5)
    dense = [dequantize_nvfp4(NVFP4Tensor(*t.nv(), torch.ones(()), t.shape)).double() for t in (a, w)]
    scale = float(a.global_scale * w.global_scale) * 2.0**-12  # in float16's range
    exact, magnitude = (x @ y.t() * scale for x, y in (dense, [t.abs() for t in dense]))
    tiled = repack_nvfp4(NVFP4Tensor(*w.nv(), torch.tensor(scale), w.shape).to("cuda"), "tiled")
    codes, scales = a.to("cuda").nv()
    row_scale = torch.rand(max(tokens), generator=draw(9)) + 0.5
    for m, dtype, scaled in itertools.product(tokens, HALVES, (False, True)):
        factors = row_scale[:m].cuda() if scaled else None
        moved = NVFP4Tensor(codes[:m], scales[:m], torch.ones(()), (m, k), row_scale=factors)
        first, second = (gemm_nvfp4(moved, tiled, "tc", dtype) for _ in range(2))
        assert torch.equal(first, second), (m, dtype, scaled)
        by_row = row_scale[:m, None].double() if scaled else 1.0
        want, sizes = exact[:m] * by_row, magnitude[:m] * by_row
        step = 2.0**-11 if dtype == torch.float16 else 2.0**-8
        allowed = want.abs() * step * 1.01 + sizes * (k // 16 + 4) * 2.0**-22 + 2.0**-24
        finite = want.abs() < torch.finfo(dtype).max * 0.9
        error = (first.cpu().double() - want).abs()
        assert bool((error <= allowed)[finite].all()), (m, dtype, scaled)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("shape", [(33, 256), (1040, 2048), (5120, 2048), (300, 14336)])
def test_few_tokens_codes_are_read_by_the_product_itself(
    shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of decoding them in a launch of its own, though the quantizer wrote them just before."""
    n, k = shape
    tiled = repack_nvfp4(random_tensor((n, k), 5).to("cuda"), "tiled")
    xs = torch.randn(200, 8, k, generator=draw(2)).to(dtype).cuda()

    def products() -> list[torch.Tensor]:
        made = []
        for i, x in enumerate(xs):
            a = quantize_nvfp4(x[: i % 8 + 1], row_scale=True)
            assert a.row_scale is not None
            a = NVFP4Tensor(a.codes, a.scales, torch.tensor(2.0**-9), a.shape, "nv", a.row_scale)
            made.append(gemm_nvfp4(a, tiled, "tc", dtype))
        torch.cuda.synchronize()
        return made

    have, again = products(), products()
    monkeypatch.setattr(stream_config, "CODED_TOKENS", 0)
    for i, (first, second, want) in enumerate(zip(have, again, products(), strict=True)):
        assert torch.equal(first, want), i
        assert torch.equal(second, want), i


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [1, 8, 16, 40, 130])
def test_weight_only_products(m: int, dtype: torch.dtype) -> None:
    w = quantize_nvfp4(torch.randn(130, 528, generator=draw(0)) / 23, global_scale=0.001)
    x, bias = (torch.randn(*size, generator=draw(m)).to(dtype) for size in ((m, 528), (130,)))
    tiled = repack_nvfp4(w.to("cuda"), "tiled")
    y = linear_nvfp4(x.cuda(), tiled, bias.cuda()).cpu().double()
    dense = dequantize_nvfp4(w).double()
    want = x.double() @ dense.t() + bias.double()
    # The decoded weight may be rounded to the dtype, and so is the result.
    step = 2.0**-11 if dtype == torch.float16 else 2.0**-8
    assert bool(((y - want).abs() <= step * (x.double().abs() @ dense.abs().t() + want.abs())).all())


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 20])
def test_strided_activations_and_weights_made_by_the_call_in_front(m: int) -> None:
    """Rows of any stride; tiles and bias that the kernels just before write."""
    x, bias = torch.randn(m, 528, device="cuda").half(), torch.randn(130, device="cuda")
    for seed in range(20):
        w = random_tensor((130, 528), seed).to("cuda")
        torch.cuda.synchronize()
        y = linear_nvfp4(x, repack_nvfp4(w, "tiled"), bias.half())
        torch.cuda.synchronize()
        assert torch.equal(y, linear_nvfp4(x, repack_nvfp4(w, "tiled"), bias.half()))
    tiled = repack_nvfp4(w, "tiled")
    expected = linear_nvfp4(x, tiled)
    for strided in (x.t().contiguous().t(), torch.cat([x, x[:, :1]], dim=1)[:, :528]):
        assert torch.equal(linear_nvfp4(strided, tiled), expected)


@pytest.mark.gpu
def test_a_layer_on_a_gpu_has_one_copy_and_moves_back() -> None:
    plain, _ = layers(NVFP4Settings(accum="tc"))
    x = torch.randn(5, 80, generator=draw(0)).bfloat16().float()
    expected, saved = plain(x), {name: t.clone() for name, t in plain.state_dict().items()}
    layer = copy.deepcopy(plain).cuda()
    assert {name for name, _ in layer.named_parameters()} == {"weight_tiled", "weight_global_scale"}
    assert torch.allclose(layer(x.cuda()).cpu(), expected, rtol=1e-4, atol=1e-5)
    half = layer(x.cuda().bfloat16()).float().cpu()
    assert torch.allclose(half, expected, rtol=2.0**-8, atol=1e-5)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor.cpu(), saved[name]), name
    assert torch.equal(layer.cpu()(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 20])
def test_a_cuda_graph_records_a_layer(m: int) -> None:
    layer = NVFP4Linear.from_linear(nn.Linear(256, 96).bfloat16().cuda(), NVFP4Settings(accum="tc"))
    x = torch.randn(m, 256, generator=draw(0)).bfloat16().cuda()
    with torch.no_grad():
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        y.zero_()
        graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("settings", [NVFP4Settings(), NVFP4Settings(accum="tc"), NVFP4Settings("16bit")])
def test_experts_give_in_tiles_what_they_give_without(settings: NVFP4Settings) -> None:
    """Rows of no expert, and an expert without rows, too."""
    experts = nn.Module()
    experts.gate_up_proj = nn.Parameter(torch.randn(4, 96, 72, generator=draw(0)))
    experts.down_proj = nn.Parameter(torch.randn(4, 72, 48, generator=draw(1)))
    experts.act_fn = nn.SiLU()
    layer = NVFP4Experts.from_experts(experts, settings)
    ids = torch.tensor([[0, 3], [3, 4], [0, 2], [2, 3], [0, 0]])
    x, p = torch.randn(5, 72, generator=draw(2)), torch.rand(5, 2, generator=draw(3))
    expected = layer(x, ids, p)
    layer.prepare(force=True)
    assert set(dict(layer.named_parameters())) >= {"gate_up_tiled", "down_tiled"}
    assert torch.equal(layer(x, ids, p), expected)
    assert torch.equal(
        layer.state_dict()["down_codes"], NVFP4Experts.from_experts(experts, settings).down_codes
    )
