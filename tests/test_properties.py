"""Properties over generated shapes, values and widths; every backend against the reference, bit for bit."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import kbit
from kbit.backends import cpu, reference
from kbit.format import ABSMAX_FORMATS, SUPPORTED_BITS, bitplanes
from kbit.format import reference as fmt
from kbit.format.codebook import midpoints
from kbit.quantizers.scale_search import WINDOWS

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
bits = st.sampled_from(SUPPORTED_BITS)
dtypes = st.sampled_from(DTYPES)
needs_extension = pytest.mark.skipif(
    not cpu.available(), reason=f"no CPU kernels to compare with: {cpu.unavailable_reason()}"
)
settings.register_profile("kbit", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("kbit")


@st.composite
def weights(draw, dimensions=st.sampled_from([2, 3])):
    """Weights from all over the float range: normal, tiny, huge, with zero blocks and exact ties."""
    shape = [draw(st.integers(1, 20)), draw(st.integers(1, 100))]
    if draw(dimensions) == 3:
        shape.insert(0, draw(st.integers(1, 3)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    w = torch.randn(shape, generator=generator)
    kind = draw(st.sampled_from(["normal", "tiny", "huge", "mixed", "ties", "sparse"]))
    if kind == "tiny":
        w *= 1e-7
    elif kind == "huge":
        w *= 1e4
    elif kind == "mixed":
        w *= 10.0 ** torch.randint(-9, 4, shape, generator=generator)
    elif kind == "ties":
        w = (w * 2).round() / 2
    elif kind == "sparse":
        w[torch.rand(shape, generator=generator) < 0.97] = 0
    return w.to(draw(dtypes))


@st.composite
def codebooks(draw, width):
    """The normal-float codebook, or any other legal one."""
    if draw(st.booleans()):
        return kbit.normal_float(width)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    levels = torch.rand(2**width, generator=generator).cumsum(0) - draw(st.floats(0, 8))
    return levels / levels.abs().max()


@given(data=st.data(), width=bits)
def test_pack_and_unpack_are_inverse(data, width):
    blocks = data.draw(st.integers(1, 5))
    codes = torch.randint(0, 2**width, (3, 32 * blocks), dtype=torch.uint8)
    assert torch.equal(bitplanes.unpack(bitplanes.pack(codes, width), width), codes)


@given(w=weights(), width=bits, search=st.booleans(), scale=st.sampled_from(sorted(ABSMAX_FORMATS)))
def test_decoded_weights_are_finite_and_no_larger_than_the_search_allows(w, width, search, scale):
    decoded = kbit.dequantize(kbit.quantize(w, width, scale=scale, search=search))
    assert torch.isfinite(decoded).all()
    assert (decoded.abs() <= w.float().abs().amax() * 2.1).all()


@needs_extension
@pytest.mark.parametrize("isa", cpu.supported_isas() if cpu.available() else [])
@given(data=st.data(), w=weights(), width=bits, search=st.booleans())
def test_cpu_quantize_equals_the_reference(isa, data, w, width, search):
    codebook = data.draw(codebooks(width))
    expected = reference.quantize(w, codebook, "e4m4", search)
    window = WINDOWS[width] if search else None
    got = cpu.quantize(w, codebook, midpoints(codebook), width, window, isa=isa)
    for name, ours, theirs in zip(("packed", "absmax", "scale"), got, expected, strict=True):
        assert torch.equal(ours, theirs), name


@needs_extension
@pytest.mark.parametrize("isa", cpu.supported_isas() if cpu.available() else [])
@given(data=st.data(), w=weights(), width=bits, dtype=dtypes, scale=st.sampled_from(sorted(ABSMAX_FORMATS)))
def test_cpu_dequantize_equals_the_reference(isa, data, w, width, dtype, scale):
    q = kbit.quantize(w, width, codebook=data.draw(codebooks(width)), scale=scale)
    expected = torch.empty(w.shape, dtype=dtype)
    got = torch.full(w.shape, float("nan"), dtype=dtype)
    arguments = (q.packed, q.absmax, q.codebook, q.scale, w.shape[-1])
    reference.dequantize(*arguments, expected)
    cpu.dequantize(*arguments, got, isa=isa)
    assert torch.equal(got, expected)


@needs_extension
@pytest.mark.parametrize("isa", cpu.supported_isas() if cpu.available() else [])
@given(data=st.data(), w=weights(dimensions=st.just(2)), width=bits, dtype=dtypes)
def test_cpu_linear_is_within_the_bound_of_float64(isa, data, w, width, dtype):
    q = kbit.quantize(w.clamp(-100, 100), width, codebook=data.draw(codebooks(width)))
    rows, features = data.draw(st.integers(1, 70)), w.shape[-1]
    x = torch.randn(rows, features, generator=torch.Generator().manual_seed(rows)).to(dtype)
    out = torch.full((rows, w.shape[0]), float("nan"), dtype=dtype)
    cpu.linear(x, q.packed, q.absmax, q.codebook, q.scale, None, features, out, isa=isa)
    # Weights are either rounded to T or not before the sum: take the coarser as the unit of error.
    decoded = fmt.dequantize(
        q.packed, q.absmax, q.codebook.to(dtype).float(), q.scale, features, torch.float32
    )
    exact = x.double() @ decoded.double().T
    magnitude = x.double().abs() @ decoded.double().abs().T
    unit = torch.finfo(dtype).eps
    bound = magnitude * (unit + (features + 32) * torch.finfo(torch.float32).eps) + exact.abs() * unit + 1e-30
    if dtype == torch.float16:
        bound += (features + 1) * 2.0**-24
    assert ((out.double() - exact).abs() <= bound).all()
