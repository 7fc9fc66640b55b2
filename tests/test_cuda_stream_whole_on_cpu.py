"""csrc/stream.cu, whole, run on the CPU: rings, hand-overs, several passes, gates and ragged sizes."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import kbit
from codebooks import asymmetric
from kbit.backends.cuda import driver, one_token, products, stream, tables
from kbit.backends.cuda.weight_shape import WeightShape

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
    cuda_on_cpu.install(monkeypatch, kernels, LIMITS)


def check(
    m: int,
    n: int,
    k: int,
    bits: int,
    dtype: torch.dtype,
    gated: bool = False,
    codebook: str | torch.Tensor = "nf",
) -> None:
    made = torch.Generator().manual_seed(m + n + k + bits)
    rows = 2 * (n // 16 * 16) if gated else n
    q = kbit.quantize(torch.randn(rows, k, generator=made), bits=bits, codebook=codebook, search=False)
    w = kbit.dequantize(q, torch.float32).double()
    tiled = q.tile().tiled
    x = torch.randn(m, k, generator=made).to(dtype)
    bias = torch.randn(rows, generator=made).to(dtype)
    y = torch.full((m, rows // 2 if gated else rows), float("nan"), dtype=dtype)
    stream.linear(x, tiled, q.codebook.float(), q.scale.float(), bias, rows, k, gated, y)
    cuda_on_cpu.require_product(y, x, w, bias, gated)


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5, 16, 20])
def test_every_class_of_tokens(m: int) -> None:
    for n, k in SIZES:
        check(m, n, k, 4, torch.float16)


@pytest.mark.parametrize("m", [1, 3, 16])
def test_one_launch_for_operands_as_they_are(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as by `stream.linear`, and nothing is launched of what it does not take."""
    monkeypatch.setattr(tables, "for_device", lambda index: ())
    monkeypatch.setenv("KBIT_KERNEL", "stream")
    (n, k), dtype = SIZES[0], torch.bfloat16
    q = kbit.quantize(torch.randn(n, k), bits=4, search=False)
    weight = (q.tile().tiled, q.codebook.float(), q.scale.float())
    bias, x = torch.randn(n).to(dtype), torch.randn(1, m, k).to(dtype)
    y, again = (torch.full((1, m, n), float("nan"), dtype=dtype) for _ in range(2))
    stream.linear(x[0], *weight, bias, n, k, False, y[0])
    for _ in range(2):
        assert products.linear_in_one_launch(x, *weight, bias, n, k, False, again.fill_(float("nan")))
        assert torch.equal(again, y)
    strided = torch.randn(1, m, 2 * k).to(dtype)[..., ::2]
    unaligned = torch.zeros(m * k + 1, dtype=dtype)[1:].view(1, m, k)
    several = torch.zeros(17, k, dtype=dtype)
    for given in (strided, unaligned, several, x[:, :0]):
        out = torch.zeros(*given.shape[:-1], n, dtype=dtype)
        assert not products.linear_in_one_launch(given, *weight, bias, n, k, False, out)
        assert not bool(out.any())
    spread = torch.zeros(2 * n, dtype=dtype)[::2]
    assert not products.linear_in_one_launch(x, *weight, spread, n, k, False, again)
    ragged = kbit.quantize(torch.randn(n, 35), bits=4, search=False)
    weight = (ragged.tile().tiled, ragged.codebook, ragged.scale)
    assert not products.linear_in_one_launch(x[..., :35].contiguous(), *weight, bias, n, 35, False, again)


@pytest.mark.parametrize("bits", [2, 3, 5])
def test_other_widths(bits: int) -> None:
    for m in (1, 2, 4, 8):
        check(m, *SIZES[0], bits, torch.bfloat16)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_codebooks_that_are_not_symmetric(m: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check(m, *SIZES[0], 5, dtype, codebook=asymmetric(5))


@pytest.mark.parametrize(("arch", "kilobytes"), [("80", 163), ("89", 99)])
def test_five_bits_elsewhere(arch: str, kilobytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = driver.DeviceLimits(multiprocessors=2, shared_bytes=kilobytes * 1024, arch=arch)
    monkeypatch.setattr(driver, "device_limits", lambda index: limits)
    for m in (1, 2, 4, 8, 16):
        check(m, *SIZES[0], 5, torch.float16)
        check(m, *SIZES[0], 5, torch.float16, codebook=asymmetric(5))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8])
def test_gates(m: int) -> None:
    for n, k in SIZES[:2]:
        check(m, n, k, 4, torch.float16, gated=True)


# One to three row tiles, the last ragged; several passes of a block over its part of K.
@pytest.mark.parametrize(
    ("m", "n", "k", "blocks"),
    [
        (1, 9, 2000, 2),
        (2, 16, 5309, 2),
        (3, 33, 5400, 2),
        (4, 9, 5400, 2),
        (5, 24, 2600, 2),
        (8, 9, 5400, 4),
        (7, 40, 5400, 4),
        (6, 33, 10500, 4),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_clusters_that_split_k(m: int, n: int, k: int, blocks: int, gated: bool) -> None:
    rows = 2 * -(-n // 16) * 16 if gated else n
    for bits in (4, 5):
        assert stream.plan(m, WeightShape(rows, k, bits, gated, LIMITS)).cluster == blocks
        check(m, rows // 2 if gated else n, k, bits, torch.float16, gated)


# Ragged wide groups, fewer and more of them than workers.
@pytest.mark.parametrize(
    ("bits", "m", "n", "k"),
    [
        (2, 1, 40, 2600),
        (2, 4, 72, 10500),
        (3, 1, 150, 5400),
        (3, 2, 72, 2333),
        (4, 1, 16, 5400),
        (4, 1, 24, 2600),
        (4, 3, 24, 2600),
        (4, 2, 150, 2600),
        (5, 2, 72, 5309),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_groups_of_512_columns(bits: int, m: int, n: int, k: int, gated: bool) -> None:
    rows = 2 * -(-n // 16) * 16 if gated else n
    assert stream.plan(m, WeightShape(rows, k, bits, gated, LIMITS)).config.wide
    check(m, rows // 2 if gated else n, k, bits, torch.float16, gated)


def experts_of(count: int, n: int, k: int, bits: int, made: torch.Generator):
    """Tiles [E, ...] and float64 weights of random experts; factors differ."""
    w = torch.randn(count, n, k, generator=made)
    qs = [kbit.quantize(one, bits=bits, search=False) for one in w]
    tiled = torch.stack([q.tile().tiled for q in qs])
    more = torch.rand(count, generator=made) + 0.5
    dense = torch.stack([kbit.dequantize(q, torch.float32).double() for q in qs])
    scale = more * torch.stack([q.scale for q in qs])
    return tiled, qs[0].codebook.float(), scale, dense * more.double()[:, None, None]


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    ("gated", "n", "k"),
    [(False, 72, 200), (False, 40, 4200), (True, 96, 4400), (True, 96, 600), (True, 64, 64)],
)
def test_rows_of_the_experts_of_a_token(bits: int, gated: bool, n: int, k: int) -> None:
    made = torch.Generator().manual_seed(n + k + bits)
    tiled, codebook, scale, dense = experts_of(6, n, k, bits, made)
    ids = torch.tensor([4, 0, 6, 2, -1])  # two are another device's
    x = torch.randn(1, k, generator=made).half()
    out = torch.full((len(ids), n // 2 if gated else n), float("nan"), dtype=torch.float16)
    one_token.rows(x, tiled, codebook, scale, ids, n, k, gated, out)
    for slot, expert in enumerate(ids.tolist()):
        if not 0 <= expert < 6:
            assert torch.equal(out[slot], torch.zeros_like(out[slot])), slot
            continue
        want = dense[expert] @ x[0].double()
        bound = dense[expert].abs() @ x[0].double().abs() * 2e-3 + 1e-3
        if gated:
            (gate, up), (of_gate, of_up) = want.chunk(2), bound.chunk(2)
            want, bound = (
                torch.nn.functional.silu(gate) * up,
                1.2 * of_gate * up.abs() + gate.abs() * of_up + 1e-2,
            )
        assert bool(((out[slot].double() - want).abs() <= bound).all()), slot


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize(("n", "k", "slots"), [(72, 200, 3), (40, 512, 10), (16, 300, 1)])
def test_columns_of_the_experts_of_a_token(bits: int, n: int, k: int, slots: int) -> None:
    made = torch.Generator().manual_seed(n + k + bits)
    tiled, codebook, scale, dense = experts_of(7, n, k, bits, made)
    ids = torch.randint(-1, 8, (slots,), generator=made, dtype=torch.int32)
    weights = torch.rand(slots, generator=made).bfloat16()
    x = torch.randn(slots, k, generator=made).bfloat16()
    out = torch.full((1, n), float("nan"), dtype=torch.bfloat16)
    one_token.columns(x, tiled, codebook, scale, ids, weights, n, k, out)
    mine = [(slot, e) for slot, e in enumerate(ids.tolist()) if 0 <= e < 7]
    terms = [(dense[e] * float(weights[slot]), x[slot].double()) for slot, e in mine]
    want = sum((w @ row for w, row in terms), torch.zeros(n).double())
    bound = sum((w.abs() @ row.abs() for w, row in terms), torch.zeros(n).double()) * 1e-2 + 1e-3
    assert bool(((out[0].double() - want).abs() <= bound).all())
