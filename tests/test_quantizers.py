"""Error bounds and quality of the two quantizers, from the requirement's error budget."""

import math
import pickle

import pytest
import torch

import kbit
from kbit.format import SUPPORTED_BITS, bitplanes, e4m4, reference
from kbit.format.scales import ABSMAX_FORMATS
from kbit.quantizers import scale_search

CODEBOOKS = {
    "nf": lambda bits: kbit.normal_float(bits),
    "one-sided": lambda bits: torch.linspace(0, 1, 2**bits),
    "negative": lambda bits: torch.linspace(-1, -0.1, 2**bits),
    "skewed": lambda bits: torch.cat([torch.linspace(-0.3, 0.4, 2**bits - 1), torch.ones(1)]),
}


def sqnr(w, q):
    return float(10 * torch.log10(w.square().sum() / (kbit.dequantize(q) - w).square().sum()))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_plain_error_per_element_is_within_the_budget(bits):
    """At most (largest codebook gap / 2 + 1/32 for the rounded scale) times the block's absmax."""
    w = torch.randn(512, 1024)
    error = (kbit.dequantize(kbit.quantize(w, bits=bits, search=False)) - w).abs()
    absmax = reference.split_blocks(w).abs().amax(-1).repeat_interleave(32, dim=1)
    largest_gap = kbit.normal_float(bits).diff().max()
    assert (error <= (largest_gap / 2 + 1 / 32) * absmax * (1 + 1e-6)).all()


@pytest.mark.parametrize(("bits", "least"), [(2, 5), (3, 10), (4, 15), (5, 20)])
def test_sqnr_on_a_million_normal_values(bits, least):
    w = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(bits))
    plain, searched = (sqnr(w, kbit.quantize(w, bits=bits, search=s)) for s in (False, True))
    assert plain > least
    assert searched > plain


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("search", [False, True])
def test_e4m4_costs_at_most_a_decibel_and_a_half(bits, search):
    w = torch.randn(256, 1024)
    one_byte, exact = (sqnr(w, kbit.quantize(w, bits, scale=s, search=search)) for s in ("e4m4", "float32"))
    assert exact - one_byte < 1.5


@pytest.mark.parametrize("absmax", ABSMAX_FORMATS)
@pytest.mark.parametrize("codebook", CODEBOOKS)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_search_is_never_worse_than_plain_in_any_block(bits, codebook, absmax):
    levels = CODEBOOKS[codebook](bits)
    for columns in (320, 1, 2, 4, 31, 33, 40, 63, 70):  # also of those that padding follows
        w = torch.randn(64, columns) * torch.logspace(-4, 1, 64)[:, None]
        errors = []
        for search in (True, False):
            decoded = kbit.dequantize(kbit.quantize(w, bits, codebook=levels, scale=absmax, search=search))
            errors.append(reference.split_blocks((decoded - w).double()).square().sum(-1))
        assert (errors[0] <= errors[1] * (1 + 1e-5)).all(), columns


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_search_finds_the_best_scale_of_its_window(bits):
    """Against a search written out block by block in float64."""
    w = torch.randn(8, 64)
    q = kbit.quantize(w, bits=bits)
    first, last = scale_search.WINDOWS[bits]
    levels = q.codebook.double()
    for row in range(8):
        for block in range(2):
            values = w[row, block * 32 : block * 32 + 32].double()
            plain = int(e4m4.encode(values.abs().max().float()))
            errors = {}
            for byte in range(max(1, plain + first), min(255, plain + last) + 1):
                scale = e4m4.table()[byte].double()
                nearest = (values[:, None] / scale - levels).abs().argmin(1)
                errors[byte] = float((levels[nearest] * scale - values).square().sum())
            assert errors[int(q.absmax[row, block])] <= min(errors.values()) * (1 + 1e-5)


def test_codes_are_chosen_against_the_rounded_scale():
    w = torch.randn(16, 128)
    q = kbit.quantize(w, bits=4, search=False)
    scale = e4m4.decode(q.absmax)
    codes = reference.codes_for_scale(reference.split_blocks(w), scale, q.codebook)
    assert torch.equal(bitplanes.unpack(q.packed, 4), codes.flatten(-2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_widened_exactly(dtype):
    w = torch.randn(16, 100).to(dtype)
    a, b = kbit.quantize(w), kbit.quantize(w.float())
    assert torch.equal(a.packed, b.packed)
    assert torch.equal(a.absmax, b.absmax)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_counted_and_named(value):
    w = torch.randn(2, 8, 40)
    w[1, 3, 39] = w[0, 0, 0] = value
    with pytest.raises(
        kbit.NonFiniteWeightError, match=r"layers\.3\.down_proj holds 2 NaN or Inf values"
    ) as error:
        kbit.quantize(w, where="layers.3.down_proj")
    assert error.value.count == 2
    sent = pickle.loads(pickle.dumps(error.value))
    assert (str(sent), sent.count, sent.where) == (str(error.value), 2, "layers.3.down_proj")


def test_weights_of_a_wrong_kind_are_refused():
    with pytest.raises(TypeError, match="w must be float32, float16 or bfloat16, got torch.float64"):
        kbit.quantize(torch.randn(4, 32).double())
    with pytest.raises(ValueError, match=r"\[N, K\] or \[E, N, K\] with K >= 1, got \(32,\)"):
        kbit.quantize(torch.randn(32))
    with pytest.raises(ValueError, match=r"K >= 1, got \(4, 0\) \(layers\.1\)"):
        kbit.quantize(torch.randn(4, 0), where="layers.1")
    with pytest.raises(TypeError, match=r"got torch.int8 \(layers\.1\)"):
        kbit.quantize(torch.ones(4, 32, dtype=torch.int8), where="layers.1")
    with pytest.raises(ValueError, match="unknown absmax format"):
        kbit.quantize(torch.randn(4, 32), scale="fp8")


@pytest.mark.parametrize("absmax", ABSMAX_FORMATS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 8, 64), (0, 0, 1)])
def test_no_rows_and_no_experts_are_legal(shape, absmax):
    q = kbit.quantize(torch.randn(shape), bits=3, scale=absmax)
    assert q.shape == shape
    assert q.scale.shape == shape[:-2]
    assert kbit.dequantize(q, torch.float16).shape == shape


@pytest.mark.parametrize("form", ["e4m4", "float16", "float32"])
def test_autocast_changes_nothing(form):
    for w in (torch.randn(4, 64), torch.randn(2, 4, 64)):
        expected = kbit.quantize(w, scale=form)
        with torch.autocast("cpu", torch.bfloat16):
            q = kbit.quantize(w, scale=form)
            if w.dim() == 2:
                assert kbit.QuantizedTensor.stack([q, q]).shape == (2, *w.shape)
        assert torch.equal(q.packed, expected.packed)
        assert torch.equal(q.absmax, expected.absmax)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_codebook_may_change_afterwards(dtype):
    levels = torch.tensor([-1.0, -0.25, 0.25, 1.0], dtype=dtype)
    q = kbit.quantize(torch.randn(4, 64), 2, codebook=levels)
    layer = kbit.nn.KbitLinear.from_linear(torch.nn.Linear(64, 4), 2, codebook=levels)
    levels.mul_(2)
    for codebook in (q.codebook, layer.codebook):
        assert codebook.tolist() == [-1.0, -0.25, 0.25, 1.0]


def test_a_stack_on_the_meta_device():
    q = kbit.quantize(torch.randn(4, 64, device="meta"), scale="float16")
    assert kbit.QuantizedTensor.stack([q, q]).shape == (2, 4, 64)
