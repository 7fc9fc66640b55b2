"""The NVFP4 kernels on a GPU: the reference's bytes for every op, and what only a GPU can show."""

from __future__ import annotations

import pytest
import torch

import nvfp4_cuda_cases as cases
from kbit.backends.cuda import driver
from kbit.backends.cuda import nvfp4 as cuda
from kbit.backends.cuda.nvfp4 import exact_wgmma
from kbit.nvfp4 import reference

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
SHAPES = [(5, 64), (3, 40), (7, 17), (64, 2048)]
COLUMNS = [1, 32, 100, 2048, 2072, 8192]
# Small ones, K that is padded, many tokens, the benchmark layer, long sums.
PRODUCTS = [(3, 40, 320), (8, 16, 64), (20, 70, 576), (70, 24, 272), (5, 100, 48)]
LARGE = [(1, 1024, 2048), (7, 2048, 512), (33, 512, 4096), (130, 256, 14336), (300, 1024, 2048)]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_quantize_equals_reference(dtype: torch.dtype) -> None:
    cases.check_quantize(DEVICE, dtype, SHAPES)


def test_quantize_beside_every_threshold() -> None:
    cases.check_thresholds(DEVICE)
    cases.check_scales(DEVICE)


def test_quantize_in_every_cut() -> None:
    for shape in ((1, 40), (33, 2048)):
        cases.check_cuts(DEVICE, shape)


def test_quantize_takes_views_that_are_not_aligned() -> None:
    x = cases.normal(1, 16 * 64 + 1, dtype=torch.bfloat16).to(DEVICE).flatten()[1:].view(16, 64)
    want = reference.quantize_rows(x.cpu(), True, False, 1.0)
    for few in cases.few_or_many():
        have = cuda.quantize_rows(x, True, False, 1.0)
        for name, *pair in zip(("codes", "scales", "row_scale"), have, want, strict=True):
            cases.assert_same(name, *pair, few)


def test_rows_equal_reference() -> None:
    cases.check_row_scale(DEVICE, [(9, 40), (7, 17), (2, 4112), (1, 1), (4500, 2048)])
    cases.check_dequantize(DEVICE)
    cases.check_repack(DEVICE)
    cases.check_copies(DEVICE)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_folds_equal_reference(dtype: torch.dtype) -> None:
    cases.check_norm(DEVICE, dtype, COLUMNS)
    cases.check_silu(DEVICE, dtype, COLUMNS)


@pytest.mark.parametrize("accum", ["exact", "seq16"])
def test_every_tile_gives_the_bytes_of_the_reference(accum: str) -> None:
    cases.check_gemm(DEVICE, accum, PRODUCTS, (None, *cuda.tiles(accum)))


@pytest.mark.parametrize("accum", ["exact", "seq16"])
def test_large_products_equal_reference(accum: str) -> None:
    cases.check_gemm(DEVICE, accum, LARGE, (None,))


def test_exact_products_of_tiles_equal_reference() -> None:
    cases.check_exact_tiles(DEVICE, PRODUCTS, cases.SPREAD_PAIRS)
    pairs = [("any", "any"), ("steep", "even"), ("full", "full")]
    cases.check_exact_tiles(DEVICE, [*LARGE, (40, 130, 32704), (40, 130, 32768)], pairs)


def test_every_launch_of_exact_products_on_tensor_cores_equals_reference() -> None:
    limits = driver.device_limits(0)
    if (reason := exact_wgmma.refusal(0, limits.arch)) is not None:
        pytest.skip(reason)
    cases.check_exact_plans(DEVICE, [(70, 24, 272), (130, 1000, 2112), (300, 5120, 2048)], limits)


def test_chained_products_are_within_their_bound() -> None:
    cases.check_chained(DEVICE, PRODUCTS + LARGE)
    cases.check_chained(DEVICE, PRODUCTS, cuda.tiles("tc"))


@pytest.mark.parametrize("accum", ["exact", "seq16", "tc"])
def test_products_repeat_their_bits(accum: str) -> None:
    operands = cases.to(
        DEVICE, *cases.random_matrix(20, columns=4096), *cases.random_matrix(300, columns=4096)
    )
    first = cuda.gemm(*operands, 0.1, None, accum, torch.float32)
    for _ in range(3):
        cases.assert_same("y", cuda.gemm(*operands, 0.1, None, accum, torch.float32), first, accum)


def test_the_largest_exact_sum() -> None:
    cases.check_largest_sum(DEVICE, 2**20)
    columns = 2**20 + 64
    a = cases.to(DEVICE, *cases.random_matrix(1, columns=columns))
    with pytest.raises(ValueError, match="K must be at most 1048576"):
        cuda.gemm(*a, *a, 1.0, None, "exact", torch.float32)


def test_empty_operands() -> None:
    a, w = cases.random_matrix(0, columns=64), cases.random_matrix(5, columns=64)
    for accum in ("exact", "seq16", "tc"):
        y = cuda.gemm(*cases.to(DEVICE, *a, *w), 1.0, None, accum, torch.bfloat16)
        assert y.shape == (0, 5)
    codes, scales = cuda.quantize(torch.empty(0, 64, device=DEVICE), True, False, 1.0)
    assert codes.shape == (0, 32)
    assert scales.shape == (0, 4)


def test_one_hot_activations_return_decoded_weights() -> None:
    """Under every contract: one product of 1.0 by a weight is that weight."""
    codes, scales = cases.random_matrix(48, columns=64)
    one_hot = torch.zeros(64, 64, dtype=torch.uint8)
    one_hot[torch.arange(64), torch.arange(64)] = 2
    packed = one_hot[:, 0::2] | one_hot[:, 1::2] << 4
    ones = torch.full((64, 4), 0x38, dtype=torch.uint8)
    want = reference.dequantize(codes, scales, 1.0, None, torch.float32).t() + 0.0
    for accum in ("exact", "seq16", "tc"):
        for tile in (None, "tokens8", "tokens64"):
            operands = cases.to(DEVICE, packed, ones, codes, scales)
            have = cuda.gemm(*operands, 1.0, None, accum, torch.float32, tile)
            cases.assert_same("y", have + 0.0, want, accum, tile)
