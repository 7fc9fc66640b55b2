"""Routing and KbitExperts on a GPU: equal to the reference bit for bit where rounding is defined."""

from __future__ import annotations

import itertools

import pytest
import torch

import kbit
from kbit.backends import cuda, reference
from kbit.backends.cuda import routing
from kbit.nn import KbitExperts
from moe_routings import ROUTINGS, few, layer_in_float64, not_all_mine, routed, skewed, uniform
from test_moe import Experts

pytestmark = pytest.mark.gpu
ops = torch.ops.kbit

PROBLEMS = [
    (1, 1, 1),
    (1, 10, 512),
    (32, 10, 512),
    (7, 3, 1024),
    (409, 10, 512),
    (4096, 1, 8),
    (410, 10, 512),  # from here on in two launches
    (4096, 10, 512),
    (104858, 10, 128),
    (5, 2, routing.MAX_EXPERTS),
    (5, 2, routing.MAX_EXPERTS + 1),  # torch's sort
]


def empty_routing(ids, experts):
    """Outputs full of what no kernel would write."""
    shapes = ((ids.numel(),), (experts + 1,), ids.shape)
    return [torch.full(shape, -7, dtype=torch.int32, device=ids.device) for shape in shapes]


@pytest.mark.parametrize(("tokens", "choices", "experts"), PROBLEMS)
def test_sorting_equals_the_reference(tokens, choices, experts):
    for make in ROUTINGS:
        ids = routed(make, tokens, choices, experts)
        expected = empty_routing(ids, experts)
        reference.moe_align(ids, *expected)
        for dtype in (torch.int64, torch.int32, torch.int32):
            here = ids.to("cuda", dtype)
            results = empty_routing(here, experts)
            cuda.moe_align(here, *results)
            for result, wanted in zip(results, expected, strict=True):
                assert torch.equal(result.cpu(), wanted), (make.__name__, dtype)


def test_no_tokens():
    source, bounds, inverse = ops.moe_align(torch.zeros(0, 4, dtype=torch.int64, device="cuda"), 9)
    assert (source.numel(), inverse.numel(), bounds.tolist()) == (0, 0, [0] * 10)


# One element at a time, a few pieces of 16 bytes, several blocks; the weights' dtype is read at run time.
SUMS = [(columns, torch.float32) for columns in (1, 7, 48, 2047, 2048)]
SUMS += [(48, torch.float16), (48, torch.bfloat16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "choices"), [(1, 1), (1, 10), (3, 23), (257, 8)])
def test_sums_equal_the_reference(tokens, choices, dtype):
    ids = routed(not_all_mine, tokens, choices, 12).cuda()
    _, bounds, inverse = ops.moe_align(ids, 12)
    for columns, weights_dtype in SUMS:
        y = torch.randn(ids.numel(), columns, device="cuda").to(dtype)
        y[int(bounds[-1]) :] = float("nan")
        weights = torch.rand(ids.shape, device="cuda").to(weights_dtype)
        expected = torch.empty(tokens, columns, dtype=dtype)
        reference.moe_combine(y.cpu(), inverse.cpu(), weights.cpu(), bounds.cpu(), expected)
        for _ in range(2):
            result = ops.moe_combine(y, inverse, weights, bounds)
            assert torch.equal(result.cpu(), expected), (columns, weights_dtype)
        y = torch.where(y.isnan(), 1.0, y)
        everything = ops.moe_combine(y, inverse, weights)
        reference.moe_combine(y.cpu(), inverse.cpu(), weights.cpu(), None, expected)
        assert torch.equal(everything.cpu(), expected), (columns, weights_dtype)


def quantized(dtype, bits=4, experts=16, hidden=256, intermediate=128):
    torch.manual_seed(0)
    source = Experts(experts, hidden, intermediate).to("cuda", dtype)
    return KbitExperts.from_experts(source, bits, kbit.QuantizationPolicy())


def force(kernel, monkeypatch):
    """Have rows sorted by expert multiplied by a kernel; "" is kbit's own choice."""
    if kernel in ("resident", "wgmma") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"{kernel}.cu is for sm_90a")
    monkeypatch.setenv("KBIT_KERNEL", kernel)


def inputs(make, tokens, dtype, choices=4, experts=16, hidden=256, seed=0):
    ids = routed(make, tokens, choices, experts, seed).cuda()
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).to(dtype)
    return x, ids, torch.rand(ids.shape, device="cuda", generator=generator)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["", "grouped", "resident", "wgmma", "mma"])
@pytest.mark.parametrize("tokens", [1, 2, 5, 16, 33, 100, 257, 1024, 4096])
def test_the_layer_is_right_and_repeats(tokens, kernel, dtype, monkeypatch):
    force(kernel, monkeypatch)
    layer = quantized(dtype)
    # Weights are exact in float64 when decoded to the dtype that kernels compute in; what remains is the
    # rounding of activations between the two products and of the result.
    decoded = [layer.dequantize(name, dtype) for name in layer.shapes]
    for make in ROUTINGS:
        x, ids, weights = inputs(make, tokens, dtype)
        with torch.no_grad():
            results = [layer(x, ids, weights) for _ in range(4)]
        expected = layer_in_float64(*decoded, x, ids, weights)
        error = (results[0].double() - expected).norm() / expected.norm().clamp(min=1e-9)
        assert error < {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype], make.__name__
        assert all(torch.equal(result, results[0]) for result in results[1:]), make.__name__


# Several passes over K with a tail, blocks with rows of two experts, rings that are refilled; then columns of
# more groups than there are workers.
ONE_TOKEN = [{"hidden": 2200, "intermediate": 336}, {"hidden": 4096, "intermediate": 1536}]


@pytest.mark.parametrize("sizes", ONE_TOKEN, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_token_is_right_at_every_width(bits, dtype, sizes):
    layer = quantized(dtype, bits, **sizes)
    decoded = [layer.dequantize(name, dtype) for name in layer.shapes]
    for make in ROUTINGS:
        x, ids, weights = inputs(make, 1, dtype, choices=10, hidden=sizes["hidden"])
        for some in ((ids, weights), (ids.int(), weights.to(dtype))):
            check_one_token(layer, decoded, x, *some)


def check_one_token(layer, decoded, x, ids, weights):
    expected = layer_in_float64(*decoded, x, ids, weights)
    with torch.no_grad():
        result = layer(x, ids, weights)
    error = (result.double() - expected).norm() / expected.norm().clamp(min=1e-9)
    assert error < {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}[x.dtype]


@pytest.mark.parametrize(
    ("dtype", "choices", "intermediate", "kernel"),
    [
        (torch.float16, 33, 128, ""),  # more than a warp has lanes
        (torch.float32, 4, 128, ""),
        (torch.float16, 4, 24, ""),  # gates that end within a tile
        (torch.bfloat16, 4, 128, "grouped"),
    ],
)
def test_one_token_goes_other_ways(dtype, choices, intermediate, kernel, monkeypatch):
    force(kernel, monkeypatch)
    layer = quantized(dtype, intermediate=intermediate)
    decoded = [layer.dequantize(name, dtype) for name in layer.shapes]
    check_one_token(layer, decoded, *inputs(few, 1, dtype, choices=choices))


def require_repeats(layer, x, ids, weights):
    """300 results beside traffic on another stream, all of them the same."""
    other = torch.cuda.Stream()
    noise = torch.empty(2**26, device="cuda")
    torch.use_deterministic_algorithms(True)  # new memory then holds NaN
    try:
        with torch.no_grad():
            first = layer(x, ids, weights).clone()
            for _ in range(300):
                with torch.cuda.stream(other):
                    noise.add_(1.0)
                assert torch.equal(layer(x, ids, weights), first)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("sizes", ONE_TOKEN, ids=str)
def test_one_token_repeats_while_memory_is_busy(sizes):
    layer = quantized(torch.float16, **sizes)
    x, ids, weights = inputs(uniform, 1, torch.float16, choices=10, hidden=sizes["hidden"])
    require_repeats(layer, x, ids, weights)


# Columns that end within a tile and within a team's share; experts whose weights take what 5 bits leave.
SMALL = [{"hidden": 200, "intermediate": 144}, {"experts": 4, "hidden": 2048, "intermediate": 512}]


@pytest.mark.parametrize("sizes", SMALL, ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["grouped", "resident"])
def test_few_rows_are_right_at_every_width(kernel, dtype, bits, sizes, monkeypatch):
    force(kernel, monkeypatch)
    layer, of_ids = quantized(dtype, bits, **sizes), {"experts": sizes.get("experts", 16)}
    decoded = [layer.dequantize(name, dtype) for name in layer.shapes]
    for make, tokens in itertools.product(ROUTINGS, (1, 3, 20, 61)):
        x, ids, weights = inputs(make, tokens, dtype, hidden=sizes["hidden"], **of_ids)
        check_one_token(layer, decoded, x, ids, weights)


@pytest.mark.parametrize("rows", [1, 8, 16, 40])
@pytest.mark.parametrize("sizes", [(512, 2048), (2048, 512), (72, 200)], ids=str)
@pytest.mark.parametrize("kernel", ["grouped", "resident"])
def test_one_hot_rows_return_decoded_weights(kernel, sizes, rows, monkeypatch):
    force(kernel, monkeypatch)
    out_features, in_features = sizes
    w = torch.randn(8, out_features, in_features, device="cuda", dtype=torch.float16)
    q = kbit.quantize(w, bits=4, search=False)
    decoded = kbit.dequantize(q, torch.float16)
    at = torch.randint(0, in_features, (8 * rows,), device="cuda")
    x = torch.nn.functional.one_hot(at, in_features).half()
    offsets = torch.arange(9, device="cuda", dtype=torch.int32) * rows
    expert = torch.arange(8, device="cuda").repeat_interleave(rows)
    assert torch.equal(kbit.ops.grouped_linear(x, q, offsets), decoded[expert, :, at])


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_teams_of_all_sizes_return_decoded_weights(bits, monkeypatch):
    """A row for each of some experts: from fewer units than blocks to several for each warp."""
    force("grouped", monkeypatch)
    experts = 128
    q = kbit.quantize(torch.randn(experts, 512, 2048, device="cuda").half(), bits=bits, search=False)
    decoded = kbit.dequantize(q, torch.float16)
    for active in (1, 3, 8, 9, 10, 12, 17, 33, 60, 128):
        at = torch.randint(0, 2048, (active,), device="cuda")
        x = torch.nn.functional.one_hot(at, 2048).half()
        offsets = torch.arange(experts + 1, device="cuda", dtype=torch.int32).clamp(max=active)
        expected = decoded[torch.arange(active, device="cuda"), :, at]
        assert torch.equal(kbit.ops.grouped_linear(x, q, offsets), expected), active


# Teams of several warps, then several turns of 2; down projections that follow gates and ups at once.
@pytest.mark.parametrize("bits", [3, 4])  # blocks of 24 warps and of 16
@pytest.mark.parametrize("tokens", [2, 5, 24])
def test_sorted_tokens_repeat_while_memory_is_busy(tokens, bits, monkeypatch):
    force("grouped", monkeypatch)
    layer = quantized(torch.float16, bits=bits, experts=96, hidden=2048, intermediate=512)
    x, ids, weights = inputs(uniform, tokens, torch.float16, choices=8, experts=96, hidden=2048)
    require_repeats(layer, x, ids, weights)


@pytest.mark.parametrize("tokens", [2, 24])
def test_a_layer_gives_the_bits_of_its_steps(tokens):
    layer, ops = quantized(torch.float16, experts=64, hidden=512, intermediate=256), torch.ops.kbit
    x, ids, weights = inputs(uniform, tokens, torch.float16, choices=8, experts=64, hidden=512)
    source, bounds, inverse = ops.moe_align(ids, 64)
    with torch.no_grad():
        rows = layer.grouped(x, "gate_up_proj", bounds, silu_and_mul=True, source=source)
        steps = ops.moe_combine(layer.grouped(rows, "down_proj", bounds), inverse, weights, bounds)
        assert torch.equal(layer(x, ids, weights), steps)


@pytest.mark.parametrize("rows", [1, 16])
def test_few_experts_repeat_while_memory_is_busy(rows, monkeypatch):
    force("resident", monkeypatch)
    layer = quantized(torch.float16, experts=8, hidden=2048, intermediate=512)
    x, ids, weights = inputs(uniform, 2 * rows, torch.float16, experts=8, hidden=2048)
    require_repeats(layer, x, ids, weights)


@pytest.mark.parametrize("tokens", [1, 32, 1000])
def test_one_graph_serves_every_routing(tokens):
    layer = quantized(torch.bfloat16)
    x, ids, weights = inputs(uniform, tokens, torch.bfloat16)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            layer(x, ids, weights)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = layer(x, ids, weights)
        for seed, make in enumerate(ROUTINGS, start=1):
            for static, new in zip((x, ids, weights), inputs(make, tokens, x.dtype, seed=seed), strict=True):
                static.copy_(new)
            graph.replay()
            assert torch.equal(result, layer(x, ids, weights))


def test_the_layer_compiles_whole():
    layer = quantized(torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for tokens in (3, 40):
        arguments = inputs(skewed, tokens, torch.bfloat16)
        with torch.no_grad():
            assert torch.equal(compiled(*arguments), layer(*arguments))


def test_gradients_on_a_gpu_are_those_on_the_cpu():
    layer = quantized(torch.float32)
    x, ids, weights = inputs(not_all_mine, 19, torch.float32)
    gradients = []
    for device in ("cuda", "cpu"):
        layer.to(device)
        leaves = [tensor.to(device).requires_grad_() for tensor in (x.detach(), weights.detach())]
        layer(leaves[0], ids.to(device), leaves[1]).square().sum().backward()
        gradients.append([leaf.grad.cpu() for leaf in leaves])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
