"""Every kernel on a GPU whose multiprocessors it shares: other kernels beside it must not change a bit.

Alone, a warp that reads shared memory a few instructions behind the copy that overwrites it is always in
time: millions of runs of one kernel were right that beside matrix products was wrong once in 3000. So each
is launched thousands of times by CUDA graphs while another stream never runs out of such products.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import kbit
from kbit import nvfp4
from kbit.backends.cuda import rows
from kbit.format import SUPPORTED_BITS, get_codebook
from kbit.format.codebook import midpoints
from kbit.quantizers.scale_search import WINDOWS
from moe_routings import skewed, uniform
from test_moe_cuda import force, inputs, quantized

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*CUBLAS_WORKSPACE_CONFIG")]
ops = torch.ops.kbit
HALF = [torch.float16, torch.bfloat16]
LAUNCHES = 50  # of a graph
# One that stream.cu splits among the blocks of a cluster, one that it does not, few rows, odd ones.
SHAPES = [(2048, 5120), (5120, 2048), (512, 2048), (1000, 576)]
Results = torch.Tensor | tuple[torch.Tensor, ...]


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """New memory holds NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Others:
    """Kernels on another stream: products, whose blocks fit beside another kernel's, and traffic."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.matrix, self.memory = torch.randn(1024, 1024, device="cuda"), torch.ones(2**22, device="cuda")
        self.product = self.matrix @ self.matrix

    def run_until(self, done: torch.cuda.Event) -> None:
        while not done.query():
            with torch.cuda.stream(self.stream):
                for _ in range(10):
                    torch.mm(self.matrix, self.matrix, out=self.product)
                self.memory.mul_(1.0)
            self.stream.synchronize()


def differing(compute: Callable[[], Results], replays: int) -> int:
    """Of LAUNCHES * replays results, how many are not the first, byte by byte."""

    def results() -> list[torch.Tensor]:
        given = compute()
        return [
            each.reshape(-1).view(torch.uint8) for each in (given if isinstance(given, tuple) else (given,))
        ]

    expected = [each.clone() for each in results()]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            for have, want in zip(results(), expected, strict=True):
                wrong += (have != want).any()
    others, done = Others(), torch.cuda.Event()
    for _ in range(replays):
        graph.replay()
    done.record()
    others.run_until(done)
    return int(wrong)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@torch.no_grad()
def test_few_tokens(bits, m, dtype):
    for n, k in SHAPES:
        q = kbit.quantize(torch.randn(n, k, device="cuda"), bits, search=False).tile()
        x = torch.randn(m, k, device="cuda").to(dtype)
        assert differing(lambda x=x, q=q: kbit.linear(x, q), 40) == 0, (n, k)


@pytest.mark.parametrize("m", [1, 4, 16, 32, 128, 400])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@torch.no_grad()
def test_gated(bits, m):
    q = kbit.quantize(torch.randn(3072, 2048, device="cuda"), bits, search=False).tile()
    x = torch.randn(m, 2048, device="cuda").half()
    assert differing(lambda: kbit.linear(x, q, activation="silu_and_mul"), 20) == 0


@pytest.mark.parametrize("m", [24, 32, 64, 96, 128, 192, 256, 576, 1024])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@torch.no_grad()
def test_many_tokens(bits, m):
    for (n, k), dtype in itertools.product(SHAPES, HALF):
        q = kbit.quantize(torch.randn(n, k, device="cuda"), bits, search=False).tile()
        x = torch.randn(m, k, device="cuda").to(dtype)
        assert differing(lambda x=x, q=q: kbit.linear(x, q), 10) == 0, (n, k, dtype)


@pytest.mark.parametrize("m", [24, 64, 200, 600])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@torch.no_grad()
def test_many_tokens_by_mma(bits, m, monkeypatch):
    monkeypatch.setenv("KBIT_KERNEL", "mma")
    for (n, k), dtype in itertools.product(SHAPES, HALF):
        q = kbit.quantize(torch.randn(n, k, device="cuda"), bits, search=False).tile()
        x = torch.randn(m, k, device="cuda").to(dtype)
        assert differing(lambda x=x, q=q: kbit.linear(x, q), 10) == 0, (n, k, dtype)


@pytest.mark.parametrize("kernel", ["", "grouped", "mma"])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 128, 700])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@torch.no_grad()
def test_experts(bits, tokens, kernel, monkeypatch):
    force(kernel, monkeypatch)
    for dtype, make in ((torch.float16, uniform), (torch.bfloat16, skewed)):
        sizes = {"experts": 64, "hidden": 1024}
        layer = quantized(dtype, bits, intermediate=384, **sizes)
        given = inputs(make, tokens, dtype, choices=8, **sizes)
        assert differing(lambda layer=layer, given=given: layer(*given), 10) == 0, dtype


@pytest.mark.parametrize("tokens", [2, 8, 32, 128])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@torch.no_grad()
def test_few_experts(bits, tokens, monkeypatch):
    force("resident", monkeypatch)
    for dtype, make in ((torch.float16, uniform), (torch.bfloat16, skewed)):
        sizes = {"experts": 4, "hidden": 2048}
        layer = quantized(dtype, bits, intermediate=512, **sizes)
        given = inputs(make, tokens, dtype, choices=2, **sizes)
        assert differing(lambda layer=layer, given=given: layer(*given), 10) == 0, dtype


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_norms(tokens):
    for columns in (128, 576, 2048, 8192):
        x, weight = torch.randn(tokens, columns, device="cuda"), torch.randn(columns, device="cuda")
        given = (x.half(), weight.half(), 1e-6)
        assert differing(lambda given=given: ops.rms_norm(*given), 20) == 0, columns


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_rotary(tokens):
    query, key = (torch.randn(2, tokens, heads, 128, device="cuda").half() for heads in (32, 4))
    angles = torch.randn(2, 1, tokens, 128, device="cuda").half()
    given = (query.transpose(1, 2), key.transpose(1, 2), *angles)
    assert differing(lambda: ops.rotary(*given)[0], 20) == differing(lambda: ops.rotary(*given)[1], 20) == 0


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_masks_and_angles(tokens):
    first, there = torch.tensor(99, device="cuda"), torch.rand(2, 777, device="cuda") < 0.9
    frequencies, positions = torch.rand(64, device="cuda"), torch.randint(2**18, (2, tokens), device="cuda")
    assert differing(lambda: ops.causal_mask(first, there, 2, tokens, 800, torch.half), 20) == 0
    assert differing(lambda: ops.rotary_angles(frequencies, positions, 1.0, torch.half)[1], 20) == 0


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_caches(tokens):
    key, value = torch.randn(2, 4, 8, tokens, 128, device="cuda").half()
    length = torch.tensor(3, device="cuda")

    def append():
        keys, values = torch.zeros(2, 4, 8, tokens + 5, 128, device="cuda").half()
        ops.cache_append(keys, values, key, value, length)
        return torch.cat((keys, values))

    assert differing(append, 20) == 0


@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_routing(tokens):
    x, weight = torch.randn(tokens, 2048, device="cuda").half(), torch.randn(512, 2048, device="cuda").half()
    logits = ops.moe_logits(x, weight)
    assert differing(lambda: ops.moe_logits(x, weight), 20) == 0
    assert differing(lambda: ops.moe_route(logits, 10, "softmax", True), 20) == 0
    ids, weights = ops.moe_route(logits, 10, "softmax", True)
    assert differing(lambda: ops.moe_align(ids, 512), 20) == 0
    _, bounds, inverse = ops.moe_align(ids, 512)
    y = torch.randn(ids.numel(), 2048, device="cuda").half()
    assert differing(lambda: ops.moe_combine(y, inverse, weights, bounds), 20) == 0


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_weights(bits):
    w = torch.randn(1000, 608, device="cuda").half()
    levels = get_codebook("nf", bits)
    codebook, middles = levels.cuda(), midpoints(levels).cuda()

    def whole_way() -> tuple[torch.Tensor, ...]:
        packed, absmax, scale, _ = rows.quantize_unchecked(w, codebook, middles, bits, WINDOWS[bits])
        tiled = ops.tile(packed, absmax, 608, bits)
        return packed, absmax, scale, tiled, *ops.untile(tiled, bits, 1000, 608)

    assert differing(whole_way, 10) == 0
    q = kbit.quantize(w, bits, search=False)
    assert differing(lambda: kbit.dequantize(q, torch.float16), 20) == 0
    q = q.tile()
    assert differing(lambda: kbit.dequantize(q, torch.bfloat16), 20) == 0


@pytest.mark.parametrize("accum", ["exact", "seq16", "tc"])
@pytest.mark.parametrize("m", [1, 4, 16, 33, 200])
def test_nvfp4_products(m, accum):
    weight = nvfp4.quantize_nvfp4(torch.randn(768, 2048, device="cuda"))
    x = torch.randn(m, 2048, device="cuda").half()
    a = nvfp4.quantize_nvfp4(x)
    for tile in nvfp4.tiles_nvfp4(accum, "cuda"):
        assert differing(lambda tile=tile: nvfp4.gemm_nvfp4(a, weight, accum, tile=tile), 10) == 0, tile
    if accum == "tc":
        tiled = nvfp4.repack_nvfp4(weight, "tiled")
        assert differing(lambda: nvfp4.linear_nvfp4(x, tiled), 40) == 0


@pytest.mark.parametrize("m", [1, 9, 128, 3000])
def test_nvfp4_quantizers(m):
    x = torch.randn(m, 2048, device="cuda").bfloat16()

    def parts(t: nvfp4.NVFP4Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part for part in (t.codes, t.scales, t.row_scale) if part is not None)

    for row_scale in (False, True):
        quantize = lambda row_scale=row_scale: parts(nvfp4.quantize_nvfp4(x, row_scale=row_scale))  # noqa: E731
        assert differing(quantize, 20) == 0
    assert differing(lambda: parts(nvfp4.rmsnorm_quantize_nvfp4(x, x[0], 1e-6).quantized), 20) == 0
    assert differing(lambda: parts(nvfp4.silu_mul_quantize_nvfp4(x)), 20) == 0


@pytest.mark.parametrize("dedup", ["off", "gather", "scatter", "indirect"])
@pytest.mark.parametrize("accum", ["exact", "tc"])
def test_nvfp4_experts(accum, dedup):
    experts = nvfp4.quantize_nvfp4(torch.randn(16, 96, 512, device="cuda").half())
    for tokens in (1, 16, 200):
        x = torch.randn(tokens, 512, device="cuda").half()
        ids = torch.randint(0, 16, (tokens, 4), device="cuda", dtype=torch.int32)
        call = lambda x=x, ids=ids: nvfp4.moe_gemm_nvfp4(x, experts, ids, dedup=dedup, accum=accum)  # noqa: E731
        assert differing(call, 5) == 0, tokens
