"""The CUDA kernels over rows, bit for bit against the reference: quantize, dequantize, repack, embedding."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch

from bits import assert_same
from codebooks import asymmetric
from kbit.backends import reference as backend
from kbit.backends.cuda import rows
from kbit.format import SUPPORTED_BITS, bitplanes, get_codebook, layout
from kbit.format.codebook import bits_of, midpoints
from kbit.format.errors import NonFiniteWeightError
from kbit.quantizers import quantize as reference_quantize
from kbit.quantizers.scale_search import WINDOWS

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Whole tiles; one weight; odd rows and columns; columns that are no multiple of 32; several tiles a warp.
SHAPES = [(16, 64), (1, 1), (17, 33), (3, 100), (40, 576), (70, 1000), (33, 4128)]
GUARD = 64


def codebook_for(kind: str, bits: int) -> torch.Tensor:
    """Levels on the CPU. "crowded" and "tiny" take the slow way to the nearest level."""
    levels = torch.linspace(0, 1, 2**bits)
    if kind == "one-sided":
        return levels
    if kind == "asymmetric":
        return asymmetric(bits)
    if kind == "crowded":
        return levels**4
    if kind == "tiny":
        return torch.cat([torch.tensor([-1e-30, 1e-35]), torch.linspace(0.1, 1, 2**bits - 2)])
    return get_codebook("nf", bits)


def random_weight(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)


def guarded(*shape: int, dtype: torch.dtype, offset: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned tensor `offset` elements into a longer buffer, and the elements around it."""
    count = math.prod(shape)
    buffer = torch.full((offset + count + GUARD,), 7.5, dtype=dtype, device=DEVICE)
    inner = buffer[offset : offset + count].view(shape)
    inner.fill_(float("nan"))
    return inner, torch.cat([buffer[:offset], buffer[offset + count :]])


def check_quantize(w: torch.Tensor, codebook: torch.Tensor, search: bool, *context: object) -> None:
    bits = bits_of(codebook)
    window = WINDOWS[bits] if search else None
    got = rows.quantize(w.to(DEVICE), codebook.to(DEVICE), midpoints(codebook).to(DEVICE), bits, window)
    want = reference_quantize(w, codebook, "e4m4", search)
    for name, have, expected in zip(("scale", "absmax", "packed"), got[::-1], want[::-1], strict=True):
        if name == "scale" and not have.dim():
            have, expected = have.reshape(1), expected.reshape(1)
        assert_same(name, have, expected, bits, search, w.dtype, tuple(w.shape), *context)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("search", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_equals_reference(bits: int, search: bool, dtype: torch.dtype) -> None:
    """All shapes with one codebook, the others with columns that are and are not whole blocks."""
    cases = [(shape, "nf") for shape in SHAPES]
    cases += itertools.product([(17, 33), (40, 576)], ["one-sided", "asymmetric", "crowded", "tiny"])
    for (n, k), kind in cases:
        w = random_weight(n, k, dtype=dtype, seed=n)
        w[0, : min(k, 32)] = 0  # a block of zeros
        w[-1, -1] = -0.0
        check_quantize(w, codebook_for(kind, bits), search, kind)


@pytest.mark.parametrize("magnitude", [1e-40, 1e-38, 1e-6, 1e-3, 40.0, 1e6, 1e37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_gives_each_matrix_its_factor(magnitude: float, dtype: torch.dtype) -> None:
    w = torch.randn(4, 6, 70, generator=torch.Generator().manual_seed(3))
    w[1] *= magnitude
    w[2] = 0
    w[3, 2] *= 1e-9  # one row far below the others
    for bits, search in itertools.product((2, 4, 5), (False, True)):
        check_quantize(w.to(dtype), get_codebook("nf", bits), search, magnitude)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_quantize_rounds_scales_and_ties_like_the_reference(bits: int) -> None:
    """Block maxima at every E4M4 value, midway and just beside; weights on midpoints of levels."""
    codebook = get_codebook("nf", bits)
    values = torch.tensor(
        [2.0**-10 * m / 16 for m in range(32)]
        + [2.0**e * (1 + m / 16) for e in range(-9, 5) for m in range(16)]
    )
    middle = (values[1:] + values[:-1]) / 2
    below, above = (torch.nextafter(middle, torch.tensor(to)) for to in (0.0, 9e9))
    amax = torch.cat([values, middle, below, above])
    w = torch.zeros(amax.numel(), 32)
    ties = midpoints(codebook)[:31]
    w[:, 1 : 1 + ties.numel()] = amax[:, None] * ties
    w[:, 0] = amax
    for part in (w, w[16:256]):  # with scales that need a factor, and only those that do not
        check_quantize(part.contiguous(), codebook, False)
        check_quantize(part.contiguous(), codebook, True)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_quantize_is_exact_beside_every_threshold(bits: int) -> None:
    """Weights whose quotient is a midpoint, or its neighbours, for every fraction a scale can have."""
    codebook = get_codebook("nf", bits)
    scales = torch.tensor([2.0**e * (1 + m / 16) for e in (-9, -3, 3) for m in range(16)])
    exact = scales[:, None].double() * midpoints(codebook).double()
    w = torch.zeros(3, scales.numel(), 32)
    for step, target in enumerate((-9e9, 0.0, 9e9)):
        near = exact.float()
        w[step, :, 1 : 1 + near.shape[1]] = near if step == 1 else torch.nextafter(near, torch.tensor(target))
        w[step, :, 0] = scales
    w = w.clamp(-scales[:, None], scales[:, None])
    check_quantize(w, codebook, False)


def test_quantize_of_subnormal_weights() -> None:
    """Quotients that vanish: beside a large weight the smallest ones are 0, and 0 is a midpoint."""
    w = torch.zeros(8, 32)
    w[:, 0] = torch.tensor([31.0, 30.0, 26.0, 24.0, 2.0, 1.0, 4.0, 0.5])
    w[:, 1:25] = torch.arange(1, 25) * 2.0**-149
    w[:, 25:] = -(2.0**-149)
    check_quantize(w, get_codebook("nf", 4), False)
    check_quantize(w, get_codebook("nf", 4), True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_counts_nan_and_inf(dtype: torch.dtype) -> None:
    w = torch.ones(2, 5, 40, dtype=dtype)
    w[0, 1, 39] = float("nan")
    w[1, 4, 2] = float("-inf")
    w[1, 4, 3] = float("inf")
    codebook = get_codebook("nf", 4)
    for window in (None, WINDOWS[4]):
        with pytest.raises(NonFiniteWeightError, match="3 NaN or Inf values"):
            rows.quantize(w.to(DEVICE), codebook.to(DEVICE), midpoints(codebook).to(DEVICE), 4, window)


def test_quantize_without_waiting_can_be_captured() -> None:
    """A replay on other weights, with and without a factor, and after NaN: nothing is left over."""
    codebook = get_codebook("nf", 4)
    how = (codebook.to(DEVICE), midpoints(codebook).to(DEVICE), 4, None)
    w = random_weight(3, 200, 1024, dtype=torch.bfloat16).to(DEVICE)
    rows.quantize_unchecked(w, *how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *got, nonfinite = rows.quantize_unchecked(w, *how)
    for change in (1.0, float("nan"), 2.0**12, 2.0**-12):
        w[1] = random_weight(200, 1024, dtype=torch.bfloat16, seed=1).to(DEVICE) * change
        graph.replay()
        assert int(nonfinite) == (200 * 1024 if change != change else 0)
        if change == change:
            for have, want in zip(got, reference_quantize(w.cpu(), codebook, "e4m4", False), strict=True):
                assert_same("part", have, want, change)


def test_quantize_takes_views_and_empty_weights() -> None:
    codebook = get_codebook("nf", 4).to(DEVICE)
    base = random_weight(20, 128, dtype=torch.bfloat16).to(DEVICE)
    for view in (base[:, ::2], base.t(), base.flatten()[1:2049].view(32, 64)):
        got = rows.quantize(view, codebook, midpoints(codebook), 4, None)
        want = reference_quantize(view.cpu(), codebook.cpu(), "e4m4", False)
        assert_same("packed", got[0], want[0])
        assert_same("absmax", got[1], want[1])
    packed, absmax, scale = rows.quantize(base[:0], codebook, midpoints(codebook), 4, None)
    assert packed.shape == (0, 16)
    assert absmax.shape == (0, 4)
    assert float(scale) == 1.0


def random_parts(
    n: int, k: int, bits: int, absmax: str = "e4m4", leading: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Packed, absmax (every E4M4 byte; subnormal and huge scales), codebook and scale of random codes."""
    generator = torch.Generator().manual_seed(n * 7919 + k * 31 + bits)
    shape = (*leading, n, -(-k // 32))
    codes = torch.randint(0, 2**bits, (*leading, n, shape[-1] * 32), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if absmax == "float16":
        scales = torch.randint(0, 31 << 10, shape, generator=generator).to(torch.int16).view(torch.float16)
    elif absmax == "float32":
        exponent = torch.randint(-140, 100, shape, generator=generator)
        scales = torch.ldexp(1 + torch.rand(shape, generator=generator), exponent)
    factor = torch.ldexp(torch.ones(leading), torch.randint(-9, 9, leading, generator=generator))
    return bitplanes.pack(codes, bits), scales, get_codebook("nf", bits), factor


def decoded(parts: tuple[torch.Tensor, ...], k: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(*parts[1].shape[:-1], k, dtype=dtype)
    return backend.dequantize(*parts, k, out)


def on_device(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(part.to(DEVICE) for part in parts)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_dequantize_equals_reference(bits: int, dtype: torch.dtype) -> None:
    """Formats of scales are told apart at run time, where they are loaded."""
    kinds = [("e4m4", ()), ("e4m4", (3,)), ("float16", (3,)), ("float32", (3,))]
    for (absmax, leading), (n, k) in itertools.product(kinds, SHAPES):
        parts = random_parts(n, k, bits, absmax, leading)
        want = decoded(parts, k, dtype)
        for offset in (0, 1):
            out, guard = guarded(*leading, n, k, dtype=dtype, offset=offset)
            rows.dequantize(*on_device(parts), k, out)
            assert_same("out", out, want, bits, absmax, leading, n, k, offset)
            assert bool((guard == 7.5).all()), (n, k, offset)


def test_dequantize_of_a_slice_of_rows() -> None:
    for bits in SUPPORTED_BITS:
        packed, absmax, codebook, scale = on_device(random_parts(40, 96, bits))
        out, _ = guarded(7, 96, dtype=torch.float16)
        rows.dequantize(packed[13:20], absmax[13:20], codebook, scale, 96, out)
        want = decoded(random_parts(40, 96, bits), 96, torch.float16)[13:20]
        assert_same("out", out, want, bits)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("leading", [(), (1,), (3,)])
def test_repack_equals_the_layout(bits: int, leading: tuple[int, ...]) -> None:
    for n, k in [*SHAPES, (160, 1088)]:
        packed, absmax, _, _ = random_parts(n, k, bits, leading=leading)
        tiled = rows.to_tiled(packed.to(DEVICE), absmax.to(DEVICE), bits, k)
        assert_same("tiled", tiled, layout.to_tiled(packed, absmax, bits, k), bits, n, k)
        back, scales = rows.from_tiled(tiled, bits, n, k)
        assert_same("packed", back, packed, bits, n, k)
        assert_same("absmax", scales, absmax, bits, n, k)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (3,)])
def test_dequantize_tiled_equals_reference(bits: int, dtype: torch.dtype, leading: tuple[int, ...]) -> None:
    for n, k in SHAPES:
        parts = random_parts(n, k, bits, leading=leading)
        want = decoded(parts, k, dtype)
        tiled = layout.to_tiled(parts[0], parts[1], bits, k).to(DEVICE)
        codebook, scale = parts[2].to(DEVICE), parts[3].to(DEVICE)
        for begin, end, offset in [(0, n, 0), (0, n, 1), (n // 3, n - n // 4, 0), (n - 1, n, 0)]:
            out, guard = guarded(*leading, end - begin, k, dtype=dtype, offset=offset)
            rows.dequantize_tiled(tiled, codebook, scale, bits, begin, out)
            assert_same("out", out, want[..., begin:end, :], bits, n, k, begin, end, offset)
            assert bool((guard == 7.5).all()), (n, k, begin, end, offset)


def test_dequantize_tiled_refuses_rows_that_are_not_there() -> None:
    tiled = torch.zeros(2, 3, layout.tile_words(4), dtype=torch.int32, device=DEVICE)
    codebook, scale = get_codebook("nf", 4).to(DEVICE), torch.ones((), device=DEVICE)
    for begin, shape in [(20, (13, 192)), (-1, (4, 192)), (0, (4, 193))]:
        with pytest.raises(ValueError, match="are not in tiles"):
            rows.dequantize_tiled(tiled, codebook, scale, 4, begin, torch.empty(shape, device=DEVICE))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize(("absmax", "k"), [("e4m4", 33), ("e4m4", 576), ("float32", 576), ("float16", 4128)])
def test_embedding_gathers_rows(bits: int, absmax: str, k: int) -> None:
    parts = random_parts(50, k, bits, absmax)
    ids = torch.tensor([49, 0, 7, 7, 12, 48, 1])
    for dtype in DTYPES:
        out, guard = guarded(ids.numel(), k, dtype=dtype)
        rows.embedding(ids.to(DEVICE), *on_device(parts), k, out)
        assert_same("out", out, decoded(parts, k, dtype)[ids], bits, absmax, k)
        assert bool((guard == 7.5).all())
    rows.embedding(ids[:0].to(DEVICE), *on_device(parts), k, out[:0])


@pytest.mark.parametrize("bad", [-1, 50, 2**40])
def test_embedding_traps_on_an_id_outside(bad: int) -> None:
    """In a process of its own: a trap ends the CUDA context."""
    code = f"""
import torch
from kbit.backends.cuda import rows
packed = torch.zeros(50, 8, dtype=torch.int32, device="cuda")
absmax = torch.zeros(50, 2, dtype=torch.uint8, device="cuda")
codebook, scale = torch.linspace(-1, 1, 16, device="cuda"), torch.ones((), device="cuda")
ids, out = torch.tensor([3, {bad}], device="cuda"), torch.empty(2, 64, device="cuda")
try:
    rows.embedding(ids, packed, absmax, codebook, scale, 64, out)
    torch.cuda.synchronize()
except RuntimeError as error:
    print("trapped:", type(error).__name__)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "trapped:" in result.stdout, result.stdout + result.stderr


def test_results_do_not_change_between_runs() -> None:
    w = random_weight(700, 3000, dtype=torch.bfloat16).to(DEVICE)
    codebook = get_codebook("nf", 3).to(DEVICE)
    first = rows.quantize(w, codebook, midpoints(codebook), 3, WINDOWS[3])
    for _ in range(5):
        again = rows.quantize(w, codebook, midpoints(codebook), 3, WINDOWS[3])
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_large_matrices_equal_their_parts() -> None:
    """Thousands of tiles a warp: sizes of real layers, and every block of threads takes several turns."""
    w = random_weight(4096, 4096, dtype=torch.float16)
    for bits in (4, 5):
        codebook = get_codebook("nf", bits)
        check_quantize(w, codebook, False, "4096 x 4096")
        packed, absmax, scale = (part.to(DEVICE) for part in reference_quantize(w, codebook, "e4m4", False))
        out = torch.empty_like(w, device=DEVICE)
        rows.dequantize(packed, absmax, codebook.to(DEVICE), scale, 4096, out)
        tiled = rows.to_tiled(packed, absmax, bits, 4096)
        again = torch.empty_like(out)
        rows.dequantize_tiled(tiled, codebook.to(DEVICE), scale, bits, 0, again)
        assert_same("tiled", again, out, bits)
        back = rows.from_tiled(tiled, bits, 4096, 4096)
        assert_same("packed", back[0], packed, bits)


@pytest.mark.slow
def test_more_than_two_to_the_31_weights() -> None:
    """Offsets beyond 2^31 elements and 2^32 bytes: the last rows equal those of a small matrix."""
    n, k, bits = 70_001, 32_768, 4
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    w = torch.zeros(n, k, dtype=torch.bfloat16, device=DEVICE)
    tail = random_weight(40, k, dtype=torch.bfloat16)
    w[-40:] = tail.to(DEVICE)
    codebook = get_codebook("nf", bits)
    levels, between = codebook.to(DEVICE), midpoints(codebook).to(DEVICE)
    packed, absmax, scale = rows.quantize(w, levels, between, bits, None)
    want = reference_quantize(tail, codebook, "e4m4", False)
    assert_same("packed", packed[-40:], want[0])
    assert_same("absmax", absmax[-40:], want[1])
    w.fill_(float("nan"))
    rows.dequantize(packed, absmax, levels, scale, k, w)
    expected = decoded((*want[:2], codebook, want[2]), k, torch.bfloat16)
    assert_same("out", w[-40:], expected)
    assert int(w[:-40].count_nonzero()) == 0
    tiled = rows.to_tiled(packed, absmax, bits, k)
    w.fill_(float("nan"))
    rows.dequantize_tiled(tiled, levels, scale, bits, 0, w)
    assert_same("tiled", w[-40:], expected)
    back = rows.from_tiled(tiled, bits, n, k)
    assert torch.equal(back[0], packed)
    assert torch.equal(back[1], absmax)
