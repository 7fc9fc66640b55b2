"""The format against golden values and against definitions written out a second time."""

import copy
import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import kbit
from kbit.format import SUPPORTED_BITS, bitplanes, e4m4, reference
from kbit.format.codebook import CODEBOOKS, get_codebook, midpoints, nearest_code, validate_codebook
from kbit.format.scales import ABSMAX_FORMATS, absmax_format

GOLDEN = Path(__file__).parent / "golden"
NF4 = kbit.normal_float(4).tolist()
ALL_BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)


def test_e4m4_decodes_every_byte_to_its_golden_value():
    golden = torch.tensor(json.loads((GOLDEN / "e4m4.json").read_text()))
    assert torch.equal(e4m4.decode(ALL_BYTES), golden)


def test_e4m4_encode_inverts_decode_for_every_byte():
    assert torch.equal(e4m4.encode(e4m4.table()), ALL_BYTES)


def test_e4m4_rounds_every_tie_to_even_carrying_into_the_exponent():
    values = e4m4.table()
    ties = (values[1:] + values[:-1]) / 2
    lower = torch.arange(255)
    assert torch.equal(e4m4.encode(ties).long(), lower + lower % 2)


def test_e4m4_rounds_to_the_nearest_on_both_sides_of_every_tie():
    values = e4m4.table()
    ties = (values[1:] + values[:-1]) / 2
    assert torch.equal(e4m4.encode(torch.nextafter(ties, torch.zeros_like(ties))), ALL_BYTES[:-1])
    assert torch.equal(e4m4.encode(torch.nextafter(ties, torch.full_like(ties, 99.0))), ALL_BYTES[1:])


def test_e4m4_saturates():
    assert e4m4.encode(torch.tensor([31.0, 31.6, 1e9, math.inf])).tolist() == [255] * 4


def test_e4m4_identities_that_kernels_use():
    normal = ALL_BYTES[16:].int()
    assert torch.equal(((normal << 19) + (116 << 23)).view(torch.float32), e4m4.decode(ALL_BYTES[16:]))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_normal_float_equals_its_golden_levels(bits):
    golden = json.loads((GOLDEN / "codebooks.json").read_text())[str(bits)]
    assert kbit.normal_float(bits).tolist() == pytest.approx(golden, rel=0, abs=6e-8)
    validate_codebook(kbit.normal_float(bits), bits)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_block_optimal_float_is_legal_and_symmetric(bits):
    levels = kbit.block_optimal_float(bits)
    validate_codebook(levels, bits)
    assert torch.equal(levels, -levels.flip(0))
    assert torch.equal(get_codebook("bof", bits), levels)


@pytest.mark.parametrize("name", sorted(CODEBOOKS))
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_midpoints_make_nearest_code_exact_with_ties_to_the_lower_index(name, bits):
    levels = get_codebook(name, bits)
    thresholds = midpoints(levels)
    above = torch.nextafter(thresholds, torch.full_like(thresholds, 9.0))
    above = torch.where(thresholds == 0, 1e-9, above)  # float64 cannot tell 1 - 1e-45 from 1
    values = torch.cat([thresholds, above, torch.linspace(-1.2, 1.2, 4001), levels])
    distance = (values.double()[:, None] - levels.double()).abs()
    # argmin returns the first of equal minima, which is the lower index.
    assert torch.equal(nearest_code(values, levels).long(), distance.argmin(1))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_bitplanes_put_bit_j_of_element_i_into_bit_i_of_word_j(bits):
    codes = torch.randint(0, 2**bits, (3, 64), dtype=torch.uint8)
    packed = bitplanes.pack(codes, bits)
    for row in range(3):
        for block in range(2):
            for plane in range(bits):
                word = int(packed[row, block * bits + plane]) & 0xFFFFFFFF
                expected = sum(((int(codes[row, block * 32 + i]) >> plane) & 1) << i for i in range(32))
                assert word == expected
    assert torch.equal(bitplanes.unpack(packed, bits), codes)


@pytest.mark.parametrize("fmt", ABSMAX_FORMATS.values(), ids=ABSMAX_FORMATS)
def test_tensor_factor_is_the_smallest_power_of_two_that_fits(fmt):
    inside = torch.tensor([[1.0, 0.0, 0.5]])
    assert fmt.tensor_factor(inside) == 1.0
    assert fmt.tensor_factor(torch.zeros(2, 3)) == 1.0
    if fmt.name == "float32":
        return
    for largest in (fmt.max * 1.01, fmt.max * 2, fmt.max * 2.5, fmt.min_normal / 3):
        factor = fmt.tensor_factor(torch.tensor([[largest, largest]]))
        assert math.frexp(float(factor))[0] == 0.5, "a power of two"
        assert largest / factor <= fmt.max < largest / factor * 2


def test_weights_outside_the_scale_range_are_not_flushed():
    tiny = torch.randn(8, 64) * 1e-8
    huge = torch.randn(8, 64) * 1e6
    for w in (tiny, huge):
        q = kbit.quantize(w, bits=5)
        assert q.scale != 1.0
        assert (kbit.dequantize(q) - w).norm() / w.norm() < 0.1


def test_factor_is_per_expert():
    w = torch.stack([torch.randn(4, 32), torch.randn(4, 32) * 1e-9])
    q = kbit.quantize(w)
    assert q.scale.shape == (2,)
    assert q.scale[0] == 1.0
    assert q.scale[1] < 1e-6
    for expert in range(2):
        assert torch.equal(kbit.dequantize(q)[expert], kbit.dequantize(kbit.quantize(w[expert])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_decode_is_the_products_in_float32_rounded_once(dtype):
    q = kbit.quantize(torch.randn(5, 70), bits=4)
    codes = bitplanes.unpack(q.packed, 4)[:, :70].long()
    levels = q.codebook.to(dtype).float()
    block_scale = e4m4.decode(q.absmax).repeat_interleave(32, dim=1)[:, :70]
    assert torch.equal(kbit.dequantize(q, dtype), (levels[codes] * block_scale * q.scale).to(dtype))


def test_all_zero_block_decodes_to_zero_with_the_code_nearest_zero():
    q = kbit.quantize(torch.zeros(2, 64), bits=3)
    assert q.absmax.eq(0).all()
    assert bitplanes.unpack(q.packed, 3).eq(3).all(), "levels 3 and 4 tie; the lower index wins"
    assert kbit.dequantize(q).eq(0).all()


@pytest.mark.parametrize("shape", [(1, 1), (17, 33), (1000, 31), (3, 576), (2, 5, 40)])
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_any_shape_round_trips(shape, bits):
    w = torch.randn(shape)
    q = kbit.quantize(w, bits=bits)
    assert q.shape == shape
    assert q.packed.shape == (*shape[:-1], reference.blocks_of(shape[-1]) * bits)
    assert kbit.dequantize(q).shape == w.shape


def test_bits_per_weight_counts_scales_and_padding():
    assert kbit.quantize(torch.randn(8, 64), bits=4).bits_per_weight == 4.25
    assert kbit.quantize(torch.randn(8, 64), bits=2, scale="float16").bits_per_weight == 2.5
    assert kbit.quantize(torch.randn(8, 48), bits=4).bits_per_weight == pytest.approx(4.25 * 64 / 48)


def test_absmax_format_is_found_by_name_and_dtype():
    for fmt in ABSMAX_FORMATS.values():
        assert absmax_format(fmt.name) is fmt is absmax_format(fmt.dtype)
    with pytest.raises(ValueError, match="unknown absmax format 'int8'"):
        absmax_format("int8")


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        ([-1.0, 0.0, 1.0], ValueError, "has 4 levels, got shape"),
        ([-1.0, 0.5, 0.0, 1.0], ValueError, "ascending"),
        ([-1.0, 0.0, 0.0, 1.0], ValueError, "ascending"),
        ([-1.0, 0.0, math.nan, 1.0], ValueError, "finite"),
        ([-1.0, 0.0, 0.5, math.inf], ValueError, "finite"),
        ([-2.0, 0.0, 0.5, 1.0], ValueError, "largest magnitude 1, got 2"),
        (torch.tensor([-1, 0, 1, 2]), TypeError, "float32"),
        (torch.empty(4, device="meta"), TypeError, "hold its 4 levels, got torch.strided on meta"),
        (torch.ones(4).to_sparse(), TypeError, "must be dense"),
        ("fp4", ValueError, "unknown codebook 'fp4'; known: bof, nf. Give another by its 4 levels"),
    ],
)
def test_bad_codebooks_are_refused(levels, error, message):
    with pytest.raises(error, match=message):
        kbit.quantize(torch.randn(4, 32), bits=2, codebook=levels)


@pytest.mark.parametrize("bits", [0, 1, 6, 8, 4.0, True, "4", None])
def test_bad_bits_are_refused(bits):
    with pytest.raises(ValueError, match=r"bits must be one of \(2, 3, 4, 5\)"):
        kbit.quantize(torch.randn(4, 32), bits=bits)


def test_parts_that_do_not_belong_together_are_refused():
    q = kbit.quantize(torch.randn(8, 64), bits=4)
    make = kbit.QuantizedTensor
    with pytest.raises(ValueError, match="need 12 words and 3 scales a row, got 8 and 2"):
        make(q.packed, q.absmax, q.codebook, q.scale, 4, (8, 65))
    with pytest.raises(ValueError, match="16 levels for 4 bits"):
        make(q.packed, q.absmax, kbit.normal_float(3), q.scale, 4, (8, 64))
    with pytest.raises(TypeError, match="packed must be int32, got torch.int64"):
        make(q.packed.long(), q.absmax, q.codebook, q.scale, 4, (8, 64))
    with pytest.raises(ValueError, match="do not belong to one weight"):
        make(q.packed[:4], q.absmax, q.codebook, q.scale, 4, (8, 64))
    with pytest.raises(ValueError, match="does not match absmax"):
        make(q.packed, q.absmax, q.codebook, q.scale, 4, (9, 64))
    with pytest.raises(TypeError, match="codebook must be dense, got torch.sparse_coo"):
        make(q.packed, q.absmax, q.codebook.to_sparse(), q.scale, 4, (8, 64))


@pytest.mark.parametrize("tiled", [False, True], ids=["canonical", "tiled"])
@pytest.mark.parametrize("wrong", [None, 64, "nf", (), (64,), (8, 0), (8, 64.0), {}, (1, 1, 8, 64)], ids=str)
def test_a_shape_that_is_none_is_refused(wrong, tiled):
    q, t = kbit.quantize(torch.randn(8, 64)), kbit.quantize(torch.randn(8, 64)).tile()
    make, parts = kbit.QuantizedTensor, (q.packed, q.absmax)
    if tiled:
        make, parts = kbit.QuantizedTensor.from_tiles, (t.tiled,)
    with pytest.raises((TypeError, ValueError), match="quantized tensor: shape must be"):
        make(*parts, q.codebook, q.scale, 4, wrong)


@pytest.mark.parametrize("shape", [[8, 64], torch.Size([8, 64]), np.array([8, 64])], ids=type)
def test_a_shape_may_be_any_sequence_of_sizes(shape):
    q = dataclasses.replace(kbit.quantize(torch.randn(8, 64)), shape=shape)
    assert q.shape == (8, 64)
    assert kbit.linear(torch.randn(2, 64), q, torch.randn(8)).shape == (2, 8)


@pytest.mark.parametrize("name", ["packed", "absmax", "codebook", "scale"])
def test_parts_that_are_no_tensors_are_named(name):
    q = kbit.quantize(torch.randn(8, 32))
    for wrong in (None, np.zeros(16, np.float32), q):
        with pytest.raises(TypeError, match=f"{name} must be .*, got {type(wrong).__name__}"):
            dataclasses.replace(q, **{name: wrong})


def test_moving_to_the_same_device_is_free():
    q = kbit.quantize(torch.randn(8, 64))
    assert q.to("cpu") is q
    assert "bits_per_weight=4.25" in repr(q)
    assert q.to("meta").packed.is_meta


def test_codes_are_not_cast():
    q = kbit.quantize(torch.randn(4, 40), bits=4)
    with pytest.raises(
        TypeError, match=r"codes have no dtype, got torch\.float16\. Use kbit\.dequantize\(q, dtype\)"
    ):
        q.to(torch.float16)


@pytest.mark.parametrize("where", ["meta", "cpu"])
def test_codebooks_and_quantizing_do_not_depend_on_the_default_device(where):
    w = torch.randn(4, 64)
    expected = kbit.quantize(w, bits=3, scale="float16")
    with torch.device(where):
        assert torch.equal(kbit.normal_float(3), expected.codebook)
        assert (
            kbit.QuantizationPolicy(codebook=[-1.0, 0.0, 0.5, 1.0], bits=2).codebook_for(2).device.type
            == "cpu"
        )
        for scale in ABSMAX_FORMATS:
            assert kbit.quantize(w, bits=3, scale=scale).device.type == "cpu"
        q = kbit.quantize(w, bits=3, scale="float16")
    assert torch.equal(q.packed, expected.packed)
    assert torch.equal(q.absmax, expected.absmax)


@pytest.mark.parametrize(
    "levels", [None, 7j, [1, "a", 2, 3], ["a"] * 4, [[1, 2], [3]], [10**400] * 4], ids=str
)
def test_a_codebook_that_is_no_numbers_is_refused(levels):
    with pytest.raises(TypeError, match="codebook must be a name of"):
        get_codebook(levels, 2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("bits", 0, "^bits must be one of"),
        ("embedding_bits", 0, "embedding_bits must be one of"),
        ("overrides", {"mlp": 7}, r"overrides\['mlp'\] must be one of .* got 7"),
        ("overrides", {"(": 4}, "not a regular expression"),
        ("overrides", {3: 4}, "3 is not a regular expression"),
        ("overrides", {"a{99999999999}": 4}, "not a regular expression: the repetition number"),
        ("overrides", {"(" * 5000 + ")" * 5000: 4}, "not a regular expression"),
        ("overrides", {"(?x) mlp": 4}, "has the flag x"),
        ("overrides", ["mlp"], "overrides must map"),
        ("overrides", [["mlp", 3], ["mlp", 4]], "have an expression twice"),
        ("overrides", {"mlp": False}, r"overrides\['mlp'\] must be one of .* got False"),
        ("modules_to_not_convert", "lm_head", "must be a list of names, got 'lm_head'"),
        ("modules_to_not_convert", 5, "must be a list of names, got 5"),
        ("modules_to_not_convert", [5], "must be a list of names only"),
        ("modules_to_not_convert", ["lm_head", ""], "an empty name, which is no module's"),
        ("absmax_format", "fp8", "unknown absmax format 'fp8'"),
        ("absmax_format", torch.uint8, "unknown absmax format 'torch.uint8'"),
        ("search", "no", "search must be True or False, got 'no'"),
        ("search", 1, "search must be True or False, got 1"),
        ("codebook", {"x": [1]}, r"no levels for 4 bits, only for x\. Add them\."),
        ("codebook", {"4": None}, "codebook must be a name of"),
        ("codebook", {4: "nf"}, "4 bits need 16 numbers, got 'nf'"),
        ("codebook", {4: NF4, 9: "x"}, "a width of codebook must be one of"),
        ("codebook", {4: NF4, 3: [0.1, 1.0]}, "codebook"),
    ],
)
def test_bad_fields_of_a_policy_are_named(field, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kbit.QuantizationPolicy(**{field: value})


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a|a)*$",
        "(a*?b?)+?$",
        "(?:(a{1,9})b){9}",
        "(?=(a+)+$)",
        r"([)](\)a)+)*",
        "(a+)(?#c)+$",
        "((){5000}){5000}",
        r"()\1{100000000}",
        "(){100000000,}",
        "a*" * 9,
        "a?" * 40,
        "(a|a)" * 40,
        r"(?i)(.*)(.*)(.*)\1b",
        "(?P<x>.*)(?P=x)b",
        "(a)?(?(1)b|c)",
    ],
)
def test_an_override_that_could_be_searched_for_forever_is_refused(pattern):
    with pytest.raises(ValueError, match="overrides: .* (repeats a|refers to a group|has too many repeats)"):
        kbit.QuantizationPolicy(overrides={pattern: 3}).bits_for("a" * 60 + "!")


def test_overrides_share_the_time_that_a_name_may_take():
    name = "a" * 100
    slow = [f".*.*.*b{number}" for number in range(30)]
    assert kbit.QuantizationPolicy(overrides=dict.fromkeys(slow[:10], 3)).bits_for(name) == 4
    with pytest.raises(ValueError, match="there are too many with repeats or alternatives"):
        kbit.QuantizationPolicy(overrides=dict.fromkeys(slow, 3)).bits_for(name)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"^model\.layers\.(?:[0-9]|1\d|2[0-3])\.\w+\.(?:gate|up)_proj(?:\.weight)?$", True),
        (r"(?i)MLP\..*PROJ", True),
        (r"(?<!shared_)(?P<what>mlp)(?!\.experts).*(up|down)", True),
        (r"(lay)*ers\.[0-9]{2}\.", True),
        (r"[]()*+|]+(?# (a+ )|\(a+\)+", False),
        (r"(\.\w{3}){1}(?# once )\.up_(proj)?$", True),
    ],
)
def test_overrides_are_found_as_re_does(pattern, found):
    name = "model.layers.17.mlp.up_proj"
    assert bool(re.search(pattern, name)) == found
    assert kbit.QuantizationPolicy(overrides={pattern: 3}).bits_for(name) == (3 if found else 4)


@pytest.mark.parametrize("name", ["mlp.gate", "mlp.gate.wg", "mlp.router.layer", "shared_expert_gate"])
def test_routers_stay_with_what_is_in_them(name):
    assert kbit.QuantizationPolicy().bits_for(f"model.layers.0.{name}") is None
    assert kbit.QuantizationPolicy(overrides={"gate|router": 5}).bits_for(f"model.layers.0.{name}") == 5
    assert kbit.QuantizationPolicy().bits_for("model.layers.0.mlp.gate_proj") == 4


@pytest.mark.parametrize("names", [{"lm_head"}, ("lm_head",), iter(["lm_head"]), {"lm_head": 1}.keys()])
def test_names_to_skip_may_come_from_any_iterable(names):
    policy = kbit.QuantizationPolicy(modules_to_not_convert=names, overrides={"lm_head": 4})
    policy.validate()
    assert policy.bits_for("lm_head") is None
    assert json.loads(json.dumps(policy.to_dict()))["modules_to_not_convert"] == ["lm_head"]


@pytest.mark.parametrize("make", [torch.tensor, np.array, list], ids=["tensor", "array", "list"])
@pytest.mark.parametrize("by_width", [False, True])
def test_policies_are_compared_whatever_holds_their_levels(make, by_width):
    levels = [-1.0, -0.25, 0.5, 1.0]

    def policy(make):
        return kbit.KbitConfig(bits=2, codebook={2: make(levels)} if by_width else make(levels))

    made = policy(make)
    assert made == copy.deepcopy(made) == policy(list)
    assert made != kbit.KbitConfig(bits=2)
    assert made.to_dict() == policy(list).to_dict()
    assert repr(made) == repr(policy(list))
    assert made.codebook_for(2).tolist() == levels


def test_levels_of_integers_are_refused_as_before():
    with pytest.raises(TypeError, match=r"codebook must be a float32 tensor, got torch\.int64"):
        kbit.KbitConfig(bits=2, codebook=torch.tensor([-1, 0, 1, 2]))
