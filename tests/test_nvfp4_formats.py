"""The two small floats, the byte layouts, the tensor that carries them, and the exact arithmetic below."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nvfp4_exactly as exactly
from kbit.nvfp4 import NVFP4Tensor, dequantize_nvfp4, exact, quantize_nvfp4, repack_nvfp4
from kbit.nvfp4.formats import e2m1, layouts, ue4m3

GOLDEN = Path(__file__).parent / "golden"
F32 = torch.float32
LARGEST = torch.finfo(F32).max
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def f32(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F32)


# -- the small floats ----------------------------------------------------------------------------------------


def test_e2m1_decodes_every_code() -> None:
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    decoded = e2m1.decode(torch.arange(16, dtype=torch.uint8))
    assert decoded.tolist() == positive + [-value for value in positive]
    assert math.copysign(1, float(decoded[8])) == -1


def test_ue4m3_decodes_every_byte() -> None:
    decoded = ue4m3.decode(torch.arange(256, dtype=torch.int32).to(torch.uint8))
    assert decoded[:0x7F].tolist() == [float(exactly.decode_scale(byte)) for byte in range(0x7F)]
    assert decoded[0x7F] == 0
    assert decoded[0x7E] == 448
    assert torch.equal(decoded[128:], decoded[:128])


def test_ue4m3_agrees_with_torch_where_torch_has_it() -> None:
    byte = torch.arange(0x7F, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(ue4m3.decode(byte), byte.view(torch.float8_e4m3fn).float())


def test_ue4m3_rounds_midpoints_to_even_and_their_neighbours_apart() -> None:
    table = ue4m3.table()[:0x7F]
    middle = (table[1:].double() + table[:-1].double()).div(2).float()  # exact: 5 significant bits
    lower = torch.arange(0x7E)
    assert torch.equal(ue4m3.encode(middle).long(), lower + (lower & 1))
    assert torch.equal(ue4m3.encode(torch.nextafter(middle, f32(0.0))).long(), lower)
    assert torch.equal(ue4m3.encode(torch.nextafter(middle, f32(math.inf))).long(), lower + 1)
    assert torch.equal(ue4m3.encode(table).long(), torch.arange(0x7F))


def test_ue4m3_of_special_values() -> None:
    special = f32(
        0.0, -0.0, -1.0, math.nan, -math.inf, math.inf, 448.0, 464.0, 1e30, 2**-10, 1.1 * 2**-10, 1e-40
    )
    assert ue4m3.encode(special).tolist() == [0, 0, 0, 0, 0, 0x7E, 0x7E, 0x7E, 0x7E, 0, 1, 0]


@given(finite)
def test_ue4m3_encodes_to_the_nearest(value: float) -> None:
    assert ue4m3.encode(f32(value)).item() == exactly.encode_scale(value)


def test_the_product_of_code_and_scale_is_exact_in_16_bits() -> None:
    codes, scales = e2m1.decode(torch.arange(16, dtype=torch.uint8)), ue4m3.table()[:0x7F]
    exact_products = codes.double()[:, None] * scales.double()
    product = codes[:, None] * scales
    assert torch.equal(product.double(), exact_products)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(product.to(dtype).double(), exact_products)
        assert torch.equal((codes.to(dtype)[:, None] * scales.to(dtype)).double(), exact_products)


# -- layouts -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 1100), st.sampled_from(["ggml", "mmq"]), st.booleans(), st.integers(0)
)
def test_layouts_convert_without_loss(rows: int, columns: int, layout: str, stacked: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed % 2**63)
    lead = (2, rows) if stacked else (rows,)
    groups = layouts.round_up(columns) // 16
    codes = torch.randint(256, (*lead, groups * 8), generator=draw).to(torch.uint8)
    scales = torch.randint(256, (*lead, groups), generator=draw).to(torch.uint8)
    data = layouts.from_nv(codes, scales, layout)
    assert data.shape == layouts.codes_shape((*lead, columns), layout)
    back_codes, back_scales = layouts.to_nv(data, layout, columns)
    assert torch.equal(back_codes, codes)
    assert torch.equal(back_scales, scales)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("shape", [(0, 40), (0, 4, 40), (3, 0, 40)])
def test_no_rows_and_no_experts_have_every_layout(shape: tuple[int, ...], layout: str) -> None:
    t = repack_nvfp4(quantize_nvfp4(torch.zeros(shape), layout=layout), "nv")
    assert [tuple(part.shape) for part in t.nv()] == [(*shape[:-1], 24), (*shape[:-1], 3)]
    decoded = dequantize_nvfp4(t, torch.bfloat16)
    assert (tuple(decoded.shape), decoded.dtype) == (shape, torch.bfloat16)


def test_ggml_layout_byte_by_byte() -> None:
    codes = torch.arange(64) % 16
    data = layouts.from_nv(
        e2m1.pack(codes.to(torch.uint8))[None], torch.tensor([[10, 20, 30, 40]], dtype=torch.uint8), "ggml"
    )
    expected = [10, 20, 30, 40]
    for sub_block in range(4):
        expected += [int(codes[16 * sub_block + j] | codes[16 * sub_block + j + 8] << 4) for j in range(8)]
    assert data.tolist() == [expected]


def test_mmq_layout_is_column_major_and_padded_to_512() -> None:
    rows, columns = 3, 272
    codes = torch.randint(256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.randint(1, 126, (rows, columns // 16), dtype=torch.uint8)
    data = layouts.from_nv(codes, scales, "mmq")
    assert data.shape == (2, rows, 144)
    elements = e2m1.unpack(codes)
    for block, row in [(0, 0), (0, 2), (1, 1)]:
        # The block's address, as ggml counts it: kb * rows + row.
        found = data.flatten()[(block * rows + row) * 144 :][:144]
        groups = min(16, columns // 16 - 16 * block)
        assert found[:groups].tolist() == scales[row, 16 * block :][:groups].tolist()
        element = elements[row, 256 * block :]
        assert int(found[16]) == int(element[0] | element[8] << 4)
        assert not found[groups:16].any()
        assert not found[16 + 8 * groups :].any()


# -- the tensor ----------------------------------------------------------------------------------------------


def parts(rows: int = 4, columns: int = 32) -> dict:
    return {
        "codes": torch.zeros(rows, columns // 2, dtype=torch.uint8),
        "scales": torch.zeros(rows, columns // 16, dtype=torch.uint8),
        "global_scale": torch.ones(()),
        "shape": (rows, columns),
    }


WRONG = {
    "codes dtype": ({"codes": torch.zeros(4, 16)}, TypeError, "codes must be uint8, got float32"),
    "codes shape": (
        {"codes": torch.zeros(4, 8, dtype=torch.uint8)},
        ValueError,
        r"codes must have shape \(4, 16",
    ),
    "scales shape": ({"scales": torch.zeros(4, 1, dtype=torch.uint8)}, ValueError, "scales must have shape"),
    "no scales": ({"scales": None}, ValueError, "layout 'nv' without scales"),
    "layout": ({"layout": "cutlass"}, ValueError, "layout must be one of nv, ggml, mmq"),
    "shape": ({"shape": (32,)}, ValueError, r"shape must be \(N, K\)"),
    "no columns": ({"shape": (4, 0)}, ValueError, "K >= 1"),
    "factors": ({"global_scale": torch.ones(2)}, ValueError, r"global_scale must have shape \(\)"),
    "row scale": ({"row_scale": torch.ones(3)}, ValueError, r"row_scale must have shape \(4,\)"),
    "codes of none": ({"codes": None}, TypeError, "codes must be a tensor, got NoneType"),
    "sparse": ({"global_scale": torch.ones(1).to_sparse()}, TypeError, "global_scale must be dense"),
    "shape of none": ({"shape": None}, TypeError, "shape must be the weight's sizes"),
    "row scale dtype": ({"row_scale": torch.ones(4).half()}, TypeError, "row_scale must be float32"),
}


@pytest.mark.parametrize("change", WRONG)
def test_parts_that_do_not_belong_together_are_refused(change: str) -> None:
    values, error, message = WRONG[change]
    with pytest.raises(error, match=message):
        NVFP4Tensor(**{**parts(), **values})


def test_a_stack_and_its_experts_share_memory() -> None:
    matrices = [NVFP4Tensor(**{**parts(), "global_scale": torch.tensor(float(i))}) for i in (1, 2)]
    stack = NVFP4Tensor.stack(matrices)
    assert stack.shape == (2, 4, 32)
    assert stack.bits_per_weight == 4.5
    assert stack.expert(1).global_scale == 2
    assert stack.expert(1).codes.data_ptr() == stack.codes[1].data_ptr()
    with pytest.raises(ValueError, match="one shape, layout and device"):
        NVFP4Tensor.stack([matrices[0], NVFP4Tensor(**parts(8))])
    with pytest.raises(ValueError, match="only a stack"):
        matrices[0].expert(0)


def test_slices_of_columns_are_copied() -> None:
    whole = parts()
    half = NVFP4Tensor(whole["codes"][:, :8], whole["scales"][:, :1], whole["global_scale"], (4, 16))
    assert half.codes.is_contiguous()
    assert half.scales is not None
    assert half.scales.is_contiguous()
    assert torch.equal(half.codes, whole["codes"][:, :8])


# -- exact arithmetic ----------------------------------------------------------------------------------------


@settings(max_examples=400)
@given(finite, finite, finite)
def test_fma_rounds_once(a: float, b: float, c: float) -> None:
    assert exact.fma(f32(a), f32(b), f32(c)).item() == exactly.fma(a, b, c)


@settings(max_examples=200)
@given(st.integers(1, 2**24 - 1), st.integers(1, 2**24 - 1), st.integers(-60, 60), st.booleans())
def test_fma_where_float64_would_round_twice(a: int, b: int, shift: int, negative: bool) -> None:
    # A tie of float32 is as near as float64 can see it; the addend, below float64's last bit, breaks it.
    product = float(a) * float(b)
    addend = math.ldexp(-1.0 if negative else 1.0, shift)
    for x, y, z in [(a, b, addend), (a, 1.0, math.ldexp(product, -100)), (-a, b, addend), (a, b, -float(a))]:
        z = float(f32(z))
        assert exact.fma(f32(x), f32(y), f32(z)).item() == exactly.fma(float(x), float(y), z)


def test_fma_of_a_tie_that_only_the_lost_bits_break() -> None:
    a = 1 + 2.0**-12  # a * a = 1 + 2^-11 + 2^-24: the last term is half an ulp
    for tiny, expected in [
        (0.0, 1 + 2.0**-11),
        (2.0**-60, 1 + 2.0**-11 + 2.0**-23),
        (-(2.0**-60), 1 + 2.0**-11),
    ]:
        assert exact.fma(f32(a), f32(a), f32(tiny)).item() == expected


def test_fma_of_special_values() -> None:
    inf, nan = math.inf, math.nan
    result = exact.fma(
        f32(inf, LARGEST, 0.0, nan, 2.0**-149), f32(1.0, 2.0, inf, 1.0, 0.5), f32(1.0, 0, 1, 1, 0)
    )
    assert torch.equal(result.isnan(), torch.tensor([False, False, True, True, False]))
    assert result[[0, 1]].tolist() == [inf, inf]
    assert result[4] == 0


@given(st.integers(-(2**62), 2**62))
def test_integers_round_once(total: int) -> None:
    assert exact.integer_to_float32(torch.tensor([total])).item() == exactly.round32(Fraction(total))


def test_integers_at_ties() -> None:
    ties = [2**53 + 2**29, 2**60 + 2**36, 2**60 + 2**36 + 1, 2**60 + 2**36 - 1, 2**62 + 3 * 2**38 - 1]
    for total in ties + [-tie for tie in ties]:
        assert exact.integer_to_float32(torch.tensor([total])).item() == exactly.round32(Fraction(total))


def test_exp_is_accurate_and_ordered() -> None:
    x = torch.linspace(-87.0, 88.7, 400_001, dtype=F32)
    result, true = exact.exp(x).double(), x.double().exp()
    ulp = torch.ldexp(torch.ones_like(true), torch.frexp(true).exponent - 24)
    assert float(((result - true).abs() / ulp).max()) < 1.1
    assert bool((result[1:] >= result[:-1]).all())


def test_exp_of_special_values() -> None:
    x = f32(0.0, -0.0, 88.8, 1e30, math.inf, -104.0, -1e30, -math.inf)
    assert exact.exp(x).tolist() == [1.0, 1.0, math.inf, math.inf, math.inf, 0.0, 0.0, 0.0]
    assert exact.exp(f32(math.nan)).isnan()
    assert 0 < exact.exp(f32(-100.0)).item() < 2.0**-126  # gradual underflow


def test_exp_has_the_bits_of_the_golden_file() -> None:
    golden = json.loads((GOLDEN / "nvfp4_exp.json").read_text())
    constants = {name: getattr(exact, name).hex() for name in ("LOG2E", "LN2_HIGH", "LN2_LOW", "LIMIT")}
    constants["COEFFICIENTS"] = [value.hex() for value in exact.COEFFICIENTS]
    assert golden["constants"] == constants
    x = torch.tensor(golden["x_bits"], dtype=torch.int32).view(F32)
    assert exact.exp(x).view(torch.int32).tolist() == golden["exp_bits"]


def test_the_documentation_has_the_constants_of_exp() -> None:
    page = (Path(__file__).parents[1] / "docs" / "nvfp4.md").read_text().replace("−", "-")
    table = {name: float.fromhex(text) for name, text in re.findall(r"\| (\w+) \| (-?0x[\w.+-]+)", page)}
    named = {f"C{i}": value for i, value in enumerate(exact.COEFFICIENTS)}
    named |= {name: getattr(exact, name) for name in ("LOG2E", "LN2_HIGH", "LN2_LOW")}
    assert table == named
