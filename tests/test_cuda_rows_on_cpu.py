"""The CUDA kernels over rows, run on the CPU, give the reference's bits: indices, arithmetic, launches."""

from __future__ import annotations

import pytest
import torch

import cuda_on_cpu
import cuda_rows_on_cpu
from codebooks import asymmetric
from kbit.backends import reference as backend
from kbit.backends.cuda import rows
from kbit.format import SUPPORTED_BITS, bitplanes, get_codebook, layout
from kbit.format.codebook import bits_of, midpoints
from kbit.format.errors import NonFiniteWeightError
from kbit.quantizers import quantize as reference_quantize
from kbit.quantizers.scale_search import WINDOWS

if (REASON := cuda_on_cpu.unavailable_reason()) is not None:
    pytest.skip(REASON, allow_module_level=True)

HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> cuda_on_cpu.Kernels:
    return cuda_on_cpu.Kernels(tmp_path_factory.mktemp("cuda_rows_on_cpu"), cuda_rows_on_cpu.host_source)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, kernels: cuda_on_cpu.Kernels) -> None:
    cuda_on_cpu.install(monkeypatch, kernels)


def check_quantize(w: torch.Tensor, codebook: torch.Tensor, *context: object, search: bool = False) -> None:
    bits = bits_of(codebook)
    got = rows.quantize(w, codebook, midpoints(codebook), bits, WINDOWS[bits] if search else None)
    want = reference_quantize(w, codebook, "e4m4", search)
    for name, have, expected in zip(("scale", "absmax", "packed"), got[::-1], want[::-1], strict=True):
        differs = have.reshape(-1) != expected.reshape(-1)
        assert not bool(differs.any()), (name, bits, w.dtype, int(differs.nonzero()[0]), *context)


def blocks_of_every_weight(dtype: torch.dtype, exponent: int) -> torch.Tensor:
    """[blocks, 32]: for each of 16 fractions of a scale all weights down to 1/64 of it, and some below."""
    digits = 11 if dtype == torch.float16 else 8
    grid = torch.arange(2 ** (digits - 1), 2**digits, dtype=torch.float64) * 2.0 ** (1 - digits)
    octaves = torch.cat(
        [grid * 2.0**e for e in range(-6, 1)] + [grid[::7] * 2.0**-9, torch.zeros(1)]
    ).double()
    blocks = []
    for fraction in range(16, 32):
        inside = octaves[octaves <= fraction / 16]
        both = torch.cat([inside, -inside])
        both = torch.cat([both, both.new_zeros(-both.numel() % 31)]).view(-1, 31)
        blocks.append(torch.cat([both.new_full((both.shape[0], 1), fraction / 16), both], 1))
    return (torch.cat(blocks) * 2.0**exponent).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_codes_of_every_weight(bits: int, dtype: torch.dtype) -> None:
    """Thresholds decide as quotients do: all significands of a weight, all of a scale, several codebooks."""
    w = blocks_of_every_weight(dtype, -4)
    check_quantize(w, get_codebook("nf", bits))
    if dtype == torch.bfloat16:
        thirds = torch.tensor([-1.0, *(torch.arange(1, 2**bits - 1) / (3 * 2**bits)).tolist(), 1.0])
        for codebook in (asymmetric(bits), torch.linspace(0, 1, 2**bits), thirds):
            check_quantize(w, codebook, codebook)
        check_quantize(blocks_of_every_weight(dtype, 2), get_codebook("nf", bits))


@pytest.mark.parametrize("dtype", HALVES)
def test_scales_and_their_rounding(dtype: torch.dtype) -> None:
    """Magnitudes at, between and below all E4M4 values, blocks that count as 0, -0, factors, odd columns."""
    generator = torch.Generator().manual_seed(0)
    levels = torch.cat([torch.arange(33) / 2.0 * 2.0**-14, 2.0 ** torch.linspace(-14, 5, 400)]).to(dtype)
    w = (torch.rand(levels.numel(), 32, generator=generator) * 2 - 1) * levels[:, None].float()
    w[:, 0] = levels.float()
    w[5:40:3, 1:4] = -0.0
    for part in (w[: levels.numel() - 40], w[100:-40], w, w * 2.0**-9, w[:, :17]):
        check_quantize(part.to(dtype).contiguous(), get_codebook("nf", 4))
    several = torch.randn(3, 6, 70, generator=generator)
    several[1] *= 40.0
    several[2, 3:] *= 2.0**-20
    for bits in SUPPORTED_BITS:
        check_quantize(several.to(dtype), get_codebook("nf", bits))
        check_quantize(several.to(dtype)[:, 1:, 3:].contiguous(), get_codebook("nf", bits))


def test_subnormal_bfloat16_beside_large_weights() -> None:
    w = torch.zeros(4, 32)
    w[:, 0] = torch.tensor([31.0, 30.0, 26.0, 1.0])
    w[:, 1:25] = torch.arange(1, 25) * 2.0**-133
    w[:, 25:] = -(2.0**-133)
    for codebook in (get_codebook("nf", 4), get_codebook("nf", 5), torch.linspace(-1, 1, 16)):
        check_quantize(w.bfloat16(), codebook)


@pytest.mark.parametrize(("dtype", "search"), [(torch.float32, False), (torch.bfloat16, True)])
def test_quotients(dtype: torch.dtype, search: bool) -> None:
    """What thresholds do not do: float32 and the scale search."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(2, 40, 96, generator=generator)
    w[1] *= 50.0
    for part in (w, w[:, 1:, 2:], w[0, :9] * 1e-3):
        check_quantize(part.to(dtype).contiguous(), get_codebook("nf", 3), search=search)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_padding_counts_no_error(bits: int, dtype: torch.dtype) -> None:
    for columns in (1, 34, 40, 63):
        w = torch.randn(2, 40, columns).to(dtype)
        for codebook in (get_codebook("nf", bits), asymmetric(bits)):
            check_quantize(w, codebook, columns, search=True)


def test_nan_and_inf_are_counted() -> None:
    w = torch.ones(2, 5, 40, dtype=torch.bfloat16)
    w[0, 1, 39] = float("nan")
    w[1, 4, 2:4] = torch.tensor([float("-inf"), float("inf")])
    codebook = get_codebook("nf", 4)
    with pytest.raises(NonFiniteWeightError, match="3 NaN or Inf values"):
        rows.quantize(w, codebook, midpoints(codebook), 4, None)
    assert int(rows.quantize_unchecked(w, codebook, midpoints(codebook), 4, None)[3]) == 3


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_tiles_are_decoded(bits: int, dtype: torch.dtype) -> None:
    """Whole tiles, edges, parts of the rows, unaligned rows, several matrices with factor 1 and others."""
    generator = torch.Generator().manual_seed(bits)
    for n, k in [(16, 64), (40, 200), (17, 33)]:
        blocks = -(-k // 32)
        codes = torch.randint(0, 2**bits, (3, n, blocks * 32), generator=generator, dtype=torch.uint8)
        absmax = torch.randint(0, 256, (3, n, blocks), generator=generator, dtype=torch.uint8)
        packed, codebook = bitplanes.pack(codes, bits), get_codebook("nf", bits)
        scale = torch.tensor([1.0, 2.0**-7, 1.0])
        want = backend.dequantize(packed, absmax, codebook, scale, k, torch.empty(3, n, k, dtype=dtype))
        tiled = layout.to_tiled(packed, absmax, bits, k)
        for begin, end in [(0, n), (n // 3, n - n // 4)]:
            out = torch.full((3, end - begin, k), float("nan"), dtype=dtype)
            rows.dequantize_tiled(tiled, codebook, scale, bits, begin, out)
            assert torch.equal(out, want[:, begin:end]), (n, k, begin, end)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_levels_that_are_subnormal_meet_every_scale(bits: int, dtype: torch.dtype) -> None:
    """Kernels multiply levels and scales in units that are powers of 2, which must not round."""
    half = 2 ** (bits - 1)
    upper = 2.0 ** -torch.linspace(0, 26, half).flip(0)  # float16's smallest is 2^-24
    codebook = torch.cat([-upper.flip(0), upper])
    codes = torch.arange(256 * 64, dtype=torch.uint8).view(256, 64) % 2**bits
    absmax = torch.arange(256, dtype=torch.uint8).view(256, 1).expand(-1, 2).contiguous()
    packed, scale = bitplanes.pack(codes, bits), torch.ones(1)
    want = backend.dequantize(packed, absmax, codebook, scale, 64, torch.empty(256, 64, dtype=dtype))
    out = torch.full((256, 64), float("nan"), dtype=dtype)
    rows.dequantize_tiled(layout.to_tiled(packed, absmax, bits, 64), codebook, scale, bits, 0, out)
    assert torch.equal(out.view(torch.int16), want.view(torch.int16))
