"""kbit.linear and its kin on a GPU, through the public API: exactness, bounds, streams, graphs, memory."""

from __future__ import annotations

import gc
import importlib
import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kbit
from kbit.backends import cuda
from kbit.backends.cuda import driver, stream
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.format import SUPPORTED_BITS, bitplanes, e4m4

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
HALF = [torch.float16, torch.bfloat16]
TOKENS = (1, 2, 3, 4, 8, 9, 16, 17, 64, 65, 300)
# (N, K): one weight; odd rows and columns; one tile; a model's; one row; several passes over K.
SHAPES = [(1, 1), (17, 33), (32, 64), (1000, 576), (1, 576), (96, 4128)]
# float32 is decoded, which test_cuda_rows.py tests at every width.
KINDS = [*itertools.product(SUPPORTED_BITS, HALF), (4, torch.float32)]
MIB = 2**20


def weight(n: int, k: int, bits: int = 4) -> kbit.QuantizedTensor:
    return kbit.quantize(torch.randn(n, k, device=DEVICE), bits=bits, search=False)


def unrounded(q: kbit.QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 [..., N, K]: the codebook in `dtype` times the scales, before any rounding."""
    packed, absmax = q.canonical()
    codes = bitplanes.unpack(packed, q.bits)[..., : q.shape[-1]].long()
    scales = e4m4.decode(absmax).repeat_interleave(32, dim=-1)[..., : q.shape[-1]]
    levels = q.codebook.to(dtype).double()
    return levels[codes] * scales.double() * q.scale.double()[..., None, None]


def product_and_bound(
    x: torch.Tensor, q: kbit.QuantizedTensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x @ W^T + bias in float64, and how far a result may be from it.

    Each of K products and sums in float32 errs by 2^-23 of the magnitudes so far (tensor cores truncate), a
    weight that is rounded before it is multiplied by half a step of its dtype, and so does the result.
    """
    info = torch.finfo(x.dtype)
    w = unrounded(q, x.dtype)
    exact, size = x.double() @ w.T, x.double().abs() @ w.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = size * ((x.shape[-1] + 1) * 2.0**-23 + info.eps) + exact.abs() * info.eps
    return exact, bound + info.smallest_normal * info.eps


def gated_and_bound(
    exact: torch.Tensor, bound: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of such a product, which rounds both and silu first, and its bound."""
    info = torch.finfo(dtype)
    (gate, up), (gate_off, up_off) = exact.chunk(2, 1), bound.chunk(2, 1)
    silu = F.silu(gate)
    silu_off = 1.1 * gate_off + 4 * info.eps * silu.abs() + info.smallest_normal * info.eps
    off = silu_off * (up.abs() + up_off) + silu.abs() * up_off + 2 * info.eps * (silu * up).abs()
    return silu * up, off + info.smallest_normal * info.eps


def assert_within(y: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor, *context: object) -> None:
    error = (y.double() - exact).abs()
    assert y.isfinite().all(), context
    assert (error <= bound).all(), (float((error / bound).max()), context)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=DEVICE)


# -- values --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_against_float64(shape, bits, dtype):
    n, k = shape
    q = weight(n, k, bits)
    bias = torch.randn(n, device=DEVICE).to(dtype)
    for m in TOKENS:
        x = torch.randn(m, k, device=DEVICE).to(dtype)
        for b in (None, bias):
            out = poisoned(m, n, dtype=dtype)
            kbit.linear(x, q, b, out=out)
            assert_within(out, *product_and_bound(x, q, b), m, b is None)
    assert q.tiled is not None


@pytest.mark.parametrize(("bits", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_hot_activations_return_the_decoded_weights_exactly(shape, bits, dtype):
    n, k = shape
    q = weight(n, k, bits)
    w = kbit.dequantize(q, dtype)
    reference = kbit.dequantize(q.to("cpu"), dtype)
    assert torch.equal(w.cpu(), reference), "canonical"
    for m in TOKENS:
        chosen = torch.randint(k, (m,), device=DEVICE)
        x = F.one_hot(chosen, k).to(dtype)
        y = kbit.linear(x, q, out=poisoned(m, n, dtype=dtype))
        assert torch.equal(y, w.T[chosen]), m
    assert q.tiled is not None
    assert torch.equal(kbit.dequantize(q, dtype), w), "tiled"


def test_every_weight_of_a_large_matrix_by_one_hot_rows():
    q = weight(272, 1088)
    w = kbit.dequantize(q, torch.bfloat16)
    for m in (1, 8, 64):
        for rows in torch.eye(1088, dtype=torch.bfloat16, device=DEVICE).split(m)[:: 1 if m > 1 else 7]:
            assert torch.equal(kbit.linear(rows, q), w.T[rows.argmax(1)])


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 33), (34, 64), (64, 100), (1024, 576)], ids=str)
def test_silu_and_mul(shape, dtype):
    n, k = shape
    for bits in SUPPORTED_BITS:
        q = weight(n, k, bits)
        bias = torch.randn(n, device=DEVICE).to(dtype)
        for m in TOKENS:
            x = torch.randn(m, k, device=DEVICE).to(dtype) / k**0.5
            y = kbit.linear(x, q, bias, out=poisoned(m, n // 2, dtype=dtype), activation="silu_and_mul")
            assert_within(y, *gated_and_bound(*product_and_bound(x, q, bias), dtype), m, bits)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    k=st.integers(1, 700),
    m=st.integers(1, 70),
    bits=st.sampled_from(SUPPORTED_BITS),
    dtype=st.sampled_from(HALF),
    seed=st.integers(0, 2**16),
)
def test_any_shape(n, k, m, bits, dtype, seed):
    torch.manual_seed(seed)
    q = weight(n, k, bits)
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    y = kbit.linear(x, q, out=poisoned(m, n, dtype=dtype))
    assert_within(y, *product_and_bound(x, q))


@pytest.mark.parametrize("scale", ["float16", "float32"])
def test_other_block_scales_multiply_in_canonical_form(scale):
    w, x = torch.randn(48, 100), torch.randn(5, 100)
    q = kbit.quantize(w, scale=scale)
    y = kbit.linear(x.to(DEVICE), q.to(DEVICE))
    torch.testing.assert_close(y.cpu(), kbit.linear(x, q), rtol=1e-4, atol=1e-4)


def test_factors_and_codebooks_other_than_the_usual():
    levels = torch.tensor([-0.3, 0.0, 0.1, 1.0])
    q = kbit.quantize(torch.randn(40, 100, device=DEVICE) * 1e-6, bits=2, codebook=levels)
    assert float(q.scale) != 1
    x = torch.randn(3, 100, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float32):
        assert_within(kbit.linear(x.to(dtype), q), *product_and_bound(x.to(dtype), q))


def test_quantize_and_embedding_equal_the_cpu_bit_for_bit():
    w = torch.randn(3, 50, 100)
    for bits in SUPPORTED_BITS:
        one, other = kbit.quantize(w, bits=bits), kbit.quantize(w.to(DEVICE), bits=bits)
        for part, expected in zip(other.canonical(), one.canonical(), strict=True):
            assert torch.equal(part.cpu(), expected)
    q = weight(50, 100)
    ids = torch.tensor([[3, 49], [0, 3]], device=DEVICE)
    rows = kbit.embedding(ids, q, torch.float16)
    assert torch.equal(rows, kbit.dequantize(q, torch.float16)[ids])
    assert torch.equal(kbit.embedding(ids, q.tile(), torch.float16), rows)


def test_grouped_linear():
    q = kbit.quantize(torch.randn(4, 24, 40, device=DEVICE))
    offsets = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32, device=DEVICE)
    x = torch.randn(7, 40, device=DEVICE, requires_grad=True)
    w = kbit.dequantize(q)
    expected = torch.stack([*(x[row] @ w[e].T for row, e in enumerate((0, 0, 0, 2, 2, 3))), x.new_zeros(24)])
    y = kbit.grouped_linear(x, q, offsets)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    grads = [torch.autograd.grad(result.sum(), x)[0] for result in (y, expected)]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
    fused = kbit.grouped_linear(x.detach(), q, offsets, activation="silu_and_mul")
    gate, up = y.detach().chunk(2, dim=-1)
    torch.testing.assert_close(fused, F.silu(gate) * up, rtol=1e-4, atol=1e-4)


# -- arguments -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [(), (0,), (2, 0), (2, 3)], ids=str)
def test_any_leading_shape(rows):
    q = weight(48, 72)
    x = torch.randn(*rows, 72, device=DEVICE).half()
    y = kbit.linear(x, q)
    assert y.shape == (*rows, 48)
    assert_within(y.reshape(-1, 48), *product_and_bound(x.reshape(-1, 72), q))


@pytest.mark.parametrize("m", [3, 40])
def test_strided_and_shifted_activations(m):
    q = weight(48, 72)
    for x in (
        torch.randn(72, m, device=DEVICE).half().t(),
        torch.randn(m, 144, device=DEVICE).half()[:, ::2],
        torch.randn(m * 72 + 1, device=DEVICE).half()[1:].view(m, 72),
    ):
        assert torch.equal(kbit.linear(x, q), kbit.linear(x.clone(memory_format=torch.contiguous_format), q))


def test_activations_elsewhere_are_refused():
    q = weight(48, 72)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"x is on cpu, the weight on cuda:0 \(up_proj\)"):
            kbit.linear(torch.randn(2, 72), q, where="up_proj")
        q.tile()


def test_backends_can_be_forced(monkeypatch):
    q, x = weight(48, 72), torch.randn(4, 72, device=DEVICE)
    expected = kbit.linear(x, q)
    monkeypatch.setenv("KBIT_BACKEND", "reference")
    for form in (q, q.to("cpu").to(DEVICE)):
        torch.testing.assert_close(kbit.linear(x, form), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setenv("KBIT_BACKEND", "cuda")
    assert torch.equal(kbit.linear(x, q), expected)
    monkeypatch.setenv("KBIT_BACKEND", "cpu")
    with pytest.raises(ValueError, match="the CPU kernels need CPU tensors, got cuda:0"):
        kbit.linear(x, q)


def test_without_kernels_the_reference_answers_and_says_so_once(monkeypatch):
    monkeypatch.setattr(cuda, "unavailable_reason", lambda *_: "NVRTC was not found")
    monkeypatch.setattr(importlib.import_module("kbit.dispatch.backends"), "_warned", set())
    q, x = kbit.quantize(torch.randn(48, 72)).to(DEVICE), torch.randn(4, 72, device=DEVICE)
    with pytest.warns(UserWarning, match="its CUDA kernels: NVRTC was not found"):
        y = kbit.linear(x, q)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(kbit.linear(x, q), y)
    assert q.tiled is None
    assert_within(y, *product_and_bound(x, q))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device_than_the_current_one():
    q = weight(48, 72).tile()
    x = torch.randn(4, 72, device=DEVICE).half()
    y = kbit.linear(x, q)
    moved = q.to("cuda:1")
    assert moved.tiled is not None
    assert torch.equal(kbit.linear(x.to("cuda:1"), moved).cpu(), y.cpu())
    layer = kbit.nn.KbitLinear.from_linear(torch.nn.Linear(72, 48)).cuda(0)
    expected = layer(x)
    assert torch.equal(layer.cuda(1)(x.to("cuda:1")).cpu(), expected.cpu())
    with pytest.raises(ValueError, match="x is on cuda:0, the weight on cuda:1"):
        kbit.linear(x, moved)


# One to 8 tokens, and as many columns as it takes for 2 or 4 blocks to split them; N has ragged row tiles.
@pytest.mark.parametrize(
    ("m", "n", "k", "blocks"),
    [
        (1, 1000, 2037, 2),
        (2, 40, 8224, 2),
        (3, 4104, 8224, 2),
        (4, 4104, 14400, 2),
        (5, 2024, 4128, 2),
        (8, 40, 8224, 4),
        (6, 4104, 14400, 4),
    ],
)
def test_clusters_that_split_columns(m, n, k, blocks):
    limits = driver.device_limits(torch.cuda.current_device())
    for bits, dtype, gated in itertools.product(SUPPORTED_BITS, HALF, (False, True)):
        rows = 2 * (n // 16 * 16) if gated else n
        if limits.arch == "90a":
            assert stream.plan(m, WeightShape(rows, k, bits, gated, limits)).cluster == blocks
        check_stream(m, rows, k, bits, dtype, gated)


@pytest.mark.parametrize(
    ("bits", "m", "n", "k"),
    [
        (2, 1, 2024, 2309),
        (2, 4, 4500, 4128),
        (3, 1, 8600, 5309),
        (4, 1, 1400, 2309),
        (4, 3, 1400, 4000),
        (3, 2, 4500, 2309),
        (4, 1, 40, 8224),
        (4, 2, 8600, 2309),
        (5, 2, 4500, 4128),
    ],
)
def test_groups_of_512_columns(bits, m, n, k):
    limits = driver.device_limits(torch.cuda.current_device())
    for dtype, gated in itertools.product(HALF, (False, True)):
        rows = 2 * (n // 16 * 16) if gated else n
        if limits.arch == "90a" and limits.multiprocessors == 132:
            assert stream.plan(m, WeightShape(rows, k, bits, gated, limits)).config.wide
        check_stream(m, rows, k, bits, dtype, gated)


def check_stream(m, rows, k, bits, dtype, gated):
    """Within bounds, and exact with one-hot activations."""
    q = weight(rows, k, bits)
    x = torch.randn(m, k, device=DEVICE).to(dtype) / k**0.5
    y = kbit.linear(x, q, activation="silu_and_mul" if gated else None)
    exact, bound = product_and_bound(x, q)
    if gated:
        assert_within(y, *gated_and_bound(exact, bound, dtype), bits, dtype)
        return
    assert_within(y, exact, bound, bits, dtype)
    chosen = torch.randint(k, (m,), device=DEVICE)
    y = kbit.linear(F.one_hot(chosen, k).to(dtype), q)
    assert torch.equal(y, kbit.dequantize(q, dtype).T[chosen]), (bits, dtype)


# -- order of execution --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16, 64])
def test_repeated_runs_are_bit_identical_on_a_busy_gpu(m, dtype):
    noise = torch.randn(1024, 1024, device=DEVICE)
    busy = torch.cuda.Stream()
    for n, k in ((2048, 5120), (5120, 2048), (512, 2048), (1000, 576)):
        for bits in SUPPORTED_BITS:
            q = weight(n, k, bits)
            x = torch.randn(m, k, device=DEVICE).to(dtype)
            expected = kbit.linear(x, q)
            differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
            out = poisoned(m, n, dtype=dtype)
            torch.cuda.synchronize()
            for _ in range(200):
                with torch.cuda.stream(busy):
                    torch.mm(noise, noise)
                out.fill_(torch.nan)
                kbit.linear(x, q, out=out)
                differing += (out.view(torch.int16) != expected.view(torch.int16)).sum()
            assert int(differing) == 0, (n, k, bits)


def test_two_streams_share_tiles_that_the_first_one_made():
    x = torch.randn(4, 2048, device=DEVICE).half()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(10):
        q = weight(4096, 2048)
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            one = kbit.linear(x, q)
        with torch.cuda.stream(second):
            other = kbit.linear(x, q)
        torch.cuda.synchronize()
        assert torch.equal(one, other)
        assert_within(other, *product_and_bound(x, q))


def two_layers() -> list[kbit.nn.KbitLinear]:
    """Alike, in tiles: what the first lets go of, the second is given."""
    linears = (torch.nn.Linear(576, 1000, device=DEVICE) for _ in range(2))
    layers = [kbit.nn.KbitLinear.from_linear(linear) for linear in linears]
    assert all("weight_tiled" in layer._parameters for layer in layers)
    return layers


def test_a_state_dict_is_complete_for_other_streams():
    first, second = two_layers()
    side = torch.cuda.Stream()
    expected = {name: part.cpu() for name, part in second.state_dict().items()}
    first.state_dict()
    torch.cuda._sleep(10**9)  # half a second
    state = second.state_dict()
    with torch.cuda.stream(side):
        assert all(torch.equal(part.cpu(), expected[name]) for name, part in state.items())


def test_leaving_a_gpu_that_is_busy_without_blocking():
    first, second = two_layers()
    expected = {name: part.cpu() for name, part in second.state_dict().items()}
    first.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**9)
    second.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    assert all(torch.equal(part, expected[name]) for name, part in second.state_dict().items())


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize("m", [1, 8, 64])
def test_capture_in_a_cuda_graph(m, tiled):
    q = weight(1000, 576)
    x = torch.randn(m, 576, device=DEVICE).half()
    bias = torch.randn(1000, device=DEVICE).half()
    torch.ops.kbit.linear(x, q.packed, q.absmax, q.codebook, q.scale, bias, 576)  # cuBLAS starts
    if tiled:
        q.tile()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kbit.linear(x, q, bias)
    assert (q.tiled is not None) == tiled, "nothing is prepared while a graph is recorded"
    for _ in range(3):
        x.copy_(torch.randn(m, 576, device=DEVICE))
        graph.replay()
        assert_within(y, *product_and_bound(x, q, bias))
        if tiled:
            assert torch.equal(y, kbit.linear(x, q, bias))
        else:
            kbit.linear(x, q, bias)
            assert q.tiled is None, "the graph reads the canonical form"


def test_compile_fullgraph_with_dynamic_rows():
    q = weight(1000, 576).tile()
    compiled = torch.compile(lambda x: kbit.linear(x, q).relu(), fullgraph=True, dynamic=True)
    for m in (2, 3, 70):
        x = torch.randn(m, 576, device=DEVICE).half()
        assert torch.equal(compiled(x), kbit.linear(x, q).relu())
    reduced = torch.compile(lambda x: kbit.linear(x, q), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(4, 576, device=DEVICE).half()
        assert torch.equal(reduced(x), kbit.linear(x, q))


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_in_x_and_bias(compiled, dtype):
    q = weight(200, 300)
    kbit.linear(torch.ones(1, 300, device=DEVICE), q)

    def run(x, bias):
        return kbit.linear(x, q, bias)

    function = torch.compile(run, fullgraph=True) if compiled else run
    x = torch.randn(5, 300, device=DEVICE).to(dtype).requires_grad_()
    bias = torch.randn(200, device=DEVICE).to(dtype).requires_grad_()
    grad = torch.randn(5, 200, device=DEVICE).to(dtype)
    function(x, bias).backward(grad)
    w, eps = kbit.dequantize(q, dtype).double(), torch.finfo(dtype).eps
    exact, size = grad.double() @ w, grad.double().abs() @ w.abs()
    assert_within(x.grad, exact, size * (200 * 2.0**-23 + 2 * eps))
    torch.testing.assert_close(bias.grad, grad.sum(0))


def test_a_tiled_linear_neither_waits_nor_allocates_but_its_result():
    q, x = weight(1000, 576), torch.randn(4, 576, device=DEVICE).half()
    out = kbit.linear(x, q)
    torch.cuda.set_sync_debug_mode("error")
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    try:
        kbit.linear(x, q, out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


# -- memory and layers ---------------------------------------------------------------------------------------


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_memory_after_use_is_one_copy():
    kbit.linear(torch.ones(1, 64, device=DEVICE).half(), weight(32, 64))  # what is allocated once
    x = torch.ones(1, 4096, device=DEVICE).half()
    before = allocated()
    q = kbit.quantize(torch.randn(4096, 4096)).to(DEVICE)
    assert allocated() - before <= q.nbytes + MIB / 16
    kbit.linear(x, q)
    assert q.tiled is not None
    assert allocated() - before <= q.nbytes + MIB / 16
    del q

    layer = kbit.nn.KbitLinear.from_linear(torch.nn.Linear(4096, 4096))
    nbytes, state = layer.quantized().nbytes, {k: v.clone() for k, v in layer.state_dict().items()}
    torch.cuda.reset_peak_memory_stats()
    layer.cuda()
    assert torch.cuda.max_memory_allocated() - before <= 2 * nbytes + MIB / 16
    layer(x)
    assert allocated() - before <= nbytes + MIB / 16
    layer.load_state_dict(state)
    assert all(torch.equal(value.cpu(), state[name]) for name, value in layer.state_dict().items())
    assert allocated() - before <= nbytes + MIB / 16


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_layers_are_prepared_by_moving_and_move_back_bit_for_bit(bits):
    layer = kbit.nn.KbitLinear.from_linear(torch.nn.Linear(100, 48), bits=bits)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(3, 100)
    expected = layer(x)
    layer.to(DEVICE)
    assert "weight_tiled" in dict(layer.named_parameters())
    y = layer(x.to(DEVICE))
    torch.testing.assert_close(y.cpu(), expected, rtol=1e-4, atol=1e-4)
    for name, value in layer.state_dict().items():
        assert torch.equal(value.cpu(), state[name])
    assert layer.weight.device.type == DEVICE
    layer.cpu()
    assert set(dict(layer.named_parameters())) == {"weight_packed", "weight_absmax", "bias"}
    assert torch.equal(layer(x), expected)


def test_quantizing_on_the_gpu_prepares():
    layer = kbit.nn.KbitLinear.from_linear(torch.nn.Linear(100, 48, device=DEVICE))
    assert "weight_tiled" in dict(layer.named_parameters())
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(3, 100, device=DEVICE)
    assert torch.equal(compiled(x), layer(x))


def test_a_captured_layer_sees_what_is_loaded_into_it():
    layer, other = (kbit.nn.KbitLinear.from_linear(torch.nn.Linear(100, 48)).to(DEVICE) for _ in range(2))
    x = torch.randn(3, 100, device=DEVICE).half()
    assert not torch.equal(layer(x), other(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = layer(x)
    layer.load_state_dict(other.state_dict())
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        assert torch.equal(y, other(x))


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_model_of_transformers_on_the_gpu(architecture, tmp_path):
    from tiny_models import build

    model = build(architecture, torch.float32).eval()
    kbit.quantize_model(model, kbit.QuantizationPolicy(embedding_bits=5))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([[1, 5, 9, 3, 7]])
    with torch.no_grad():
        expected = model(ids).logits
        model.to(DEVICE)
        torch.testing.assert_close(model(ids.to(DEVICE)).logits.cpu(), expected, rtol=1e-3, atol=1e-3)
    assert any(name.endswith("_tiled") for name, _ in model.named_parameters())
    now = model.state_dict()
    assert now.keys() == state.keys()
    assert all(torch.equal(now[name].cpu(), value) for name, value in state.items())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, expected, rtol=1e-4, atol=1e-4)
