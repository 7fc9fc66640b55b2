"""Weights in tiled form: the ops on them, and `QuantizedTensor` in either form. No GPU is needed for this."""

import copy
import dataclasses
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import kbit
from kbit.dispatch import tiled as dispatch_tiled
from kbit.format import SUPPORTED_BITS
from kbit.ops import forms
from kbit.ops.api import silu_and_mul

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (17, 33), (16, 64), (50, 100), (3, 40, 72)]


@pytest.fixture
def tiles_pay():
    """As if the CPU had kernels that multiply tiles."""
    before = forms.set_rule(lambda op, device: True)
    yield
    forms.set_rule(before)


def weight(*shape, bits=4):
    return kbit.quantize(torch.randn(*shape), bits=bits)


def tiled_parts(q):
    return q.tile().tiled, q.codebook, q.scale


def scaled(q):
    """The same codes with a factor per matrix that is not 1."""
    return dataclasses.replace(q, scale=q.scale * 0.5)


# -- ops -----------------------------------------------------------------------------------------------------


def opcheck_cases():
    q, e = weight(48, 72, bits=3), weight(4, 24, 40)
    x, bias, rows = torch.randn(5, 72), torch.randn(48), torch.randn(9, 40)
    offsets = torch.tensor([0, 2, 2, 7, 9], dtype=torch.int32)
    down = weight(4, 40, 12)
    ops = torch.ops.kbit
    packed, absmax = q.packed, q.absmax
    dense, stack = tiled_parts(q), tiled_parts(e)
    learning = x.clone().requires_grad_(), bias.clone().requires_grad_(), rows.clone().requires_grad_()
    return {
        "tile": (ops.tile.default, (packed, absmax, 72, 3)),
        "untile": (ops.untile.default, (q.tiled, 3, 48, 72)),
        "dequantize_tiled": (ops.dequantize_tiled.default, (*stack, 24, 40, torch.bfloat16)),
        "dequantize_tiled.out": (
            ops.dequantize_tiled.out,
            (*dense, 48, 72, torch.float32),
            torch.empty(48, 72),
        ),
        "linear_tiled": (ops.linear_tiled.default, (x, *dense, bias, 48, 72, True)),
        "linear_tiled.out": (ops.linear_tiled.out, (x, *dense, None, 48, 72), torch.empty(5, 48)),
        "linear_tiled_train": (
            ops.linear_tiled_train.default,
            (learning[0], *dense, learning[1], 48, 72),
        ),
        "linear_tiled_grad_input": (
            ops.linear_tiled_grad_input.default,
            (torch.randn(5, 48), *dense, 48, 72),
        ),
        "merged_linear_tiled": (
            ops.merged_linear_tiled.default,
            (x, [dense[0], dense[0].clone()], *dense[1:], [bias, bias + 1], [48, 48], 72, True),
        ),
        "grouped_linear_tiled": (ops.grouped_linear_tiled.default, (rows, *stack, offsets, 24, 40)),
        "grouped_linear_tiled.out": (
            ops.grouped_linear_tiled.out,
            (rows, *stack, offsets, 24, 40, True),
            torch.empty(9, 12),
        ),
        "grouped_linear_tiled_train": (
            ops.grouped_linear_tiled_train.default,
            (learning[2], *stack, offsets, 24, 40),
        ),
        "experts_tiled": (
            ops.experts_tiled.default,
            (
                torch.randn(1, 40),
                *(stack[0], tiled_parts(down)[0], stack[1], stack[2], down.scale),
                *(torch.tensor([[3, 4, 0]]), torch.rand(1, 3), 12),
            ),
        ),
        "experts_with_shared": (
            ops.experts_with_shared.default,
            (
                torch.randn(2, 40),
                [stack[0], *(tiled_parts(weight(12, 40))[0] for _ in range(2))],
                [tiled_parts(down)[0], tiled_parts(weight(40, 12))[0]],
                *(stack[1], torch.ones(5), torch.tensor([[3, 1, 4], [0, 1, 4]]), torch.rand(2, 3), 12),
            ),
        ),
        "grouped_linear_tiled_grad_input": (
            ops.grouped_linear_tiled_grad_input.default,
            (torch.randn(9, 24), *stack, offsets, 24, 40),
        ),
    }


@pytest.mark.parametrize("name", sorted(opcheck_cases()))
def test_opcheck(name):
    op, args, *out = opcheck_cases()[name]
    torch.library.opcheck(op, args, {"out": out[0]} if out else {})


def test_every_op_is_checked():
    from kbit.ops.tiled_schemas import SCHEMAS

    assert {name.removesuffix(".out") for name in opcheck_cases()} == {"tile", "untile", *SCHEMAS}


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_layer_of_experts_is_the_sum_of_theirs(tokens):
    gate_up, down = scaled(weight(5, 64, 96)), weight(5, 96, 32)
    x, weights = torch.randn(tokens, 96), torch.rand(tokens, 4)
    ids = torch.tensor([[4, 5, 0, -1], [0, 0, 7, 5], [2, 3, 4, 1]])[:tokens]  # some are another device's
    dense = [kbit.dequantize(q, torch.float32).double() for q in (gate_up, down)]
    parts = (gate_up.tile().tiled, down.tile().tiled, gate_up.codebook, gate_up.scale, down.scale)
    result = torch.ops.kbit.experts_tiled(x, *parts, ids, weights, 32)
    expected = torch.zeros(tokens, 96, dtype=torch.float64)
    for token, slot in itertools.product(range(tokens), range(4)):
        expert = int(ids[token, slot])
        if 0 <= expert < 5:
            gate, up = (dense[0][expert] @ x[token].double()).chunk(2)
            activated = torch.nn.functional.silu(gate) * up
            expected[token] += weights[token, slot].double() * (dense[1][expert] @ activated)
    assert torch.allclose(result.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(96)}, "tokens are"),
        ({"x": torch.randn(2, 96)}, "top_k_index"),
        ({"ids": torch.tensor([[0.0]])}, "ids must be int32 or int64"),
        ({"weights": torch.rand(1, 2)}, "top_k_weights"),
        ({"intermediate": 48}, "tiled"),
        ({"down": weight(4, 96, 32).tile().tiled}, "as many experts"),
        ({"gate_up": weight(64, 96).tile().tiled, "gate_up_scale": torch.tensor(1.0)}, "as many experts"),
    ],
)
def test_a_layer_of_experts_refuses(change, message):
    gate_up, down = weight(5, 64, 96), weight(5, 96, 32)
    arguments = {"x": torch.randn(1, 96), "gate_up": gate_up.tile().tiled, "down": down.tile().tiled}
    arguments |= {"codebook": gate_up.codebook, "gate_up_scale": gate_up.scale, "down_scale": down.scale}
    arguments |= {"ids": torch.tensor([[0]]), "weights": torch.rand(1, 1), "intermediate": 32}
    with pytest.raises((TypeError, ValueError), match=message):
        torch.ops.kbit.experts_tiled(**(arguments | change))


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_canonical_form_returns_bit_for_bit(shape, bits):
    q = weight(*shape, bits=bits)
    packed, absmax = q.packed, q.absmax
    tiled = torch.ops.kbit.tile(packed, absmax, shape[-1], bits)
    again = torch.ops.kbit.untile(tiled, bits, *shape[-2:])
    assert torch.equal(again[0], packed)
    assert torch.equal(again[1], absmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_one_hot_activations_return_the_decoded_weights_exactly(bits, dtype):
    q = scaled(weight(19, 100, bits=bits))
    expected = kbit.dequantize(q, dtype)
    q.tile()
    assert torch.equal(kbit.dequantize(q, dtype), expected)
    assert torch.equal(kbit.linear(torch.eye(100, dtype=dtype), q), expected.T)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (5,), (2, 0), (2, 3)])
def test_linear_equals_that_of_the_canonical_form(rows):
    q, x, bias = weight(48, 72), torch.randn(*rows, 72), torch.randn(48)
    expected = kbit.linear(x, q, bias)
    y = kbit.linear(x, q.tile(), bias)
    assert y.shape == (*rows, 48)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    strided = torch.randn(72, 6).t()
    assert torch.equal(kbit.linear(strided, q), kbit.linear(strided.contiguous(), q))


def test_weights_larger_than_a_chunk():
    q = weight(700, 40)
    x, grad = torch.randn(3, 40), torch.randn(3, 700)
    w = kbit.dequantize(q)
    q.tile()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kbit.backends.reference.products._CHUNK_WEIGHTS", 40 * 100)
        assert torch.equal(kbit.dequantize(q), w)
        torch.testing.assert_close(kbit.linear(x, q), x @ w.T, rtol=1e-5, atol=1e-5)
        given_grad = torch.ops.kbit.linear_tiled_grad_input(grad, q.tiled, q.codebook, q.scale, 700, 40)
    torch.testing.assert_close(given_grad, grad @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["canonical", "tiled"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_is_what_separate_layers_compute(dtype, form):
    q, x, bias = weight(48, 72), torch.randn(5, 72).to(dtype), torch.randn(48).to(dtype)
    if form == "tiled":
        q.tile()
    gate, up = kbit.linear(x, q, bias).chunk(2, dim=-1)
    expected = F.silu(gate) * up
    assert torch.equal(kbit.linear(x, q, bias, activation="silu_and_mul"), expected)
    out = torch.full((5, 24), torch.nan, dtype=dtype)
    assert kbit.linear(x, q, bias, out=out, activation="silu_and_mul") is out
    assert torch.equal(out, expected)
    x.requires_grad_()
    assert torch.equal(kbit.linear(x, q, bias, activation="silu_and_mul"), expected)


@pytest.mark.parametrize("form", ["canonical", "tiled"])
def test_silu_and_mul_of_experts(form):
    q, x = weight(4, 24, 40), torch.randn(7, 40)
    offsets = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    if form == "tiled":
        q.tile()
    expected = silu_and_mul(kbit.grouped_linear(x, q, offsets))
    assert torch.equal(kbit.grouped_linear(x, q, offsets, activation="silu_and_mul"), expected)
    out = torch.full((7, 12), torch.nan)
    kbit.grouped_linear(x, q, offsets, out=out, activation="silu_and_mul")
    assert torch.equal(out, expected)
    assert torch.equal(expected[6], torch.zeros(12))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", [None, "silu_and_mul"])
def test_gradients_of_linear(compiled, activation):
    q = weight(48, 72)
    w = kbit.dequantize(q)
    q.tile()

    def run(x, bias):
        return kbit.linear(x, q, bias, activation=activation)

    function = torch.compile(run, fullgraph=True) if compiled else run
    x, bias = torch.randn(2, 3, 72, requires_grad=True), torch.randn(48, requires_grad=True)
    y = function(x, bias)
    y.backward(torch.ones_like(y))
    grads = x.grad, bias.grad
    x.grad = bias.grad = None
    plain = F.linear(x, w, bias)
    (silu_and_mul(plain) if activation else plain).sum().backward()
    torch.testing.assert_close(grads, (x.grad, bias.grad), rtol=1e-4, atol=1e-4)


def test_gradients_of_grouped_linear_equal_those_of_the_canonical_form():
    q, grad = weight(4, 24, 40), torch.randn(7, 24)
    offsets = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    grads = []
    for _ in range(2):
        x = torch.ones(7, 40, requires_grad=True)
        kbit.grouped_linear(x, q, offsets).backward(grad)
        grads.append(x.grad)
        q.tile()
    assert torch.equal(*grads)


def test_compile_fullgraph_with_dynamic_rows():
    q = weight(48, 72).tile()
    compiled = torch.compile(lambda x: kbit.linear(x, q).relu(), fullgraph=True, dynamic=True)
    for rows in (2, 3, 9):
        x = torch.randn(rows, 72)
        assert torch.equal(compiled(x), kbit.linear(x, q).relu())


@pytest.mark.parametrize("traced", [False, True])
def test_bad_arguments_are_refused_with_the_layer_name_eager_and_traced(traced):
    q = weight(47, 72).tile()

    def run(x, bias=None, activation=None):
        return kbit.linear(x, q, bias, activation=activation, where="layers.3.up_proj")

    function = torch.compile(run, fullgraph=True) if traced else run
    x = torch.randn(2, 72)
    cases = [
        ((torch.randn(2, 73),), "x has 73 features, the weight expects 72"),
        ((x.double(),), "x must be float32, float16 or bfloat16, got torch.float64"),
        ((x, torch.randn(48)), r"bias must have shape \(47,\), got \(48,\)"),
        ((x, torch.randn(47).half()), "bias is torch.float16"),
        ((x, None, "silu_and_mul"), "gate rows above as many up rows, got 47"),
        ((x, None, "gelu"), "activation must be None or 'silu_and_mul', got 'gelu'"),
    ]
    for arguments, message in cases:
        with pytest.raises(Exception, match=message) as error:
            function(*arguments)
        assert "layers.3.up_proj" in str(error.value)


def test_ops_called_directly_check_tiles():
    q, ops = weight(48, 72), torch.ops.kbit
    packed, absmax = q.canonical()
    dense = tiled_parts(q)
    x = torch.randn(2, 72)
    with pytest.raises(
        ValueError, match=r"\[49, 72\] at 4 bits is int32 \[..., 4, 2, 136\], got \(3, 2, 136\)"
    ):
        ops.linear_tiled(x, *dense, None, 49, 72)
    with pytest.raises(TypeError, match="tiles must be int32, got torch.int64"):
        ops.linear_tiled(x, q.tiled.long(), q.codebook, q.scale, None, 48, 72)
    with pytest.raises(ValueError, match="scale"):
        ops.linear_tiled(x, q.tiled, q.codebook, torch.ones(2), None, 48, 72)
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.linear_tiled.out(x, *dense, None, 48, 72, True, out=torch.empty(2, 48))
    with pytest.raises(ValueError, match="Use grouped_linear"):
        ops.linear_tiled(x, q.tiled[None], q.codebook, q.scale[None], None, 48, 72)
    with pytest.raises(TypeError, match="absmax uint8"):
        ops.tile(packed, absmax.half(), 72, 4)
    with pytest.raises(ValueError, match="97 in-features at 4 bits"):
        ops.tile(packed, absmax, 97, 4)
    with pytest.raises(ValueError, match="of another layer"):
        ops.untile(q.tiled, 4, 80, 72)
    stack = tiled_parts(weight(2, 16, 72))
    with pytest.raises(ValueError, match="must ascend"):
        ops.grouped_linear_tiled(x, *stack, torch.tensor([0, 2, 1], dtype=torch.int32), 16, 72)


def test_rows_of_no_tokens_are_refused():
    q = kbit.quantize(torch.randn(2, 48, 72)).tile()
    x, offsets = torch.randn(0, 72), torch.tensor([0, 1, 1], dtype=torch.int32)
    source = torch.zeros(1, dtype=torch.int32)
    multiply = torch.ops.kbit.grouped_linear_tiled
    with pytest.raises(ValueError, match="source names 1 rows of x, which has none"):
        multiply(x, *tiled_parts(q), offsets, 48, 72, False, source)
    assert multiply(x, *tiled_parts(q), offsets * 0, 48, 72, False, source[:0]).shape == (0, 48)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match=rf"source must name rows of x, 0\.\.2, got {wrong}\.\.{wrong}"):
            multiply(torch.randn(3, 72), *tiled_parts(q), offsets, 48, 72, False, source + wrong)


def test_a_negative_number_of_rows_is_refused():
    tiled = torch.zeros(0, 2, 136, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"\[-1, 72\] at 4 bits"):
        torch.ops.kbit.untile(tiled, 4, -1, 72)
    parts = (tiled, kbit.normal_float(4), torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"\[-1, 72\] at 4 bits"):
        torch.ops.kbit.dequantize_tiled(*parts, -1, 72, torch.float32)


# -- QuantizedTensor -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_attribute_depends_on_the_form(shape):
    q = scaled(weight(*shape, bits=3))
    twin = dataclasses.replace(q)
    assert q.tile() is q
    assert set(vars(q)) == {"tiled", "codebook", "scale", "bits", "shape"}, "one copy of the codes"
    for name in ("packed", "absmax"):
        assert torch.equal(getattr(q, name), getattr(twin, name))
    for name in ("bits", "shape", "device", "absmax_format", "nbytes", "bits_per_weight"):
        assert getattr(q, name) == getattr(twin, name)
    assert q.packed is not q.packed, "made anew, not kept"
    with pytest.raises(AttributeError, match="no attribute 'codes'"):
        q.codes  # noqa: B018


@pytest.mark.parametrize(
    "clone",
    [
        copy.copy,
        copy.deepcopy,
        dataclasses.replace,
        lambda q: pickle.loads(pickle.dumps(q)),
        lambda q: q.to("cpu"),
    ],
)
def test_tiled_weights_can_be_copied(clone):
    q = weight(50, 100).tile()
    twin = clone(q)
    for part, other in zip(q.canonical(), twin.canonical(), strict=True):
        assert torch.equal(part, other)
    assert (twin.tiled is None) == (clone is dataclasses.replace)


def test_tiled_weights_move_and_stack():
    q = weight(50, 100).tile()
    assert q.to("cpu") is q
    moved = q.to("meta")
    assert moved.tiled is None
    assert moved.packed.shape == q.packed.shape
    stack = kbit.QuantizedTensor.stack([q, weight(50, 100)])
    assert torch.equal(stack.packed[0], q.packed)
    assert torch.equal(kbit.embedding(torch.tensor([3]), q, torch.float32), kbit.dequantize(q)[3:4])


def test_matrices_that_differ_are_not_stacked():
    stack, w = kbit.QuantizedTensor.stack, torch.randn(8, 64)
    q = kbit.quantize(w)
    others = [
        weight(9, 64),
        weight(8, 63),
        kbit.quantize(w, scale="float16"),
        q.to("meta"),
        weight(8, 64, bits=3),
    ]
    for other in others:
        with pytest.raises(ValueError, match="one shape, width, scale format and device"):
            stack([q, other])
    with pytest.raises(ValueError, match="one codebook"):
        stack([q, kbit.quantize(w, codebook=torch.linspace(-1, 1, 16))])
    with pytest.raises(ValueError, match="got none"):
        stack([])
    with pytest.raises(TypeError, match="takes a list of QuantizedTensor, got one with Tensor"):
        stack([q, w])
    with pytest.raises(TypeError, match="got Tensor"):
        stack(w)


def test_other_block_scales_stay_canonical(tiles_pay):
    q = kbit.quantize(torch.randn(8, 64), scale="float16")
    kbit.linear(torch.randn(2, 64), q)
    assert q.tiled is None
    with pytest.raises(TypeError, match="Quantize with scale='e4m4'"):
        q.tile()


def test_tiles_of_another_weight_are_refused():
    q = weight(50, 100).tile()
    make = kbit.QuantizedTensor.from_tiles
    assert make(q.tiled, q.codebook, q.scale, 4, (50, 100)).tiled is q.tiled
    with pytest.raises(ValueError, match=r"\[65, 100\] at 4 bits is int32"):
        make(q.tiled, q.codebook, q.scale, 4, (65, 100))
    with pytest.raises(ValueError, match="does not match tiles"):
        make(q.tiled, q.codebook, q.scale, 4, (1, 50, 100))
    with pytest.raises(ValueError, match="8 levels for 3 bits"):
        make(q.tiled, q.codebook, q.scale, 3, (50, 100))


def test_the_first_product_tiles_where_that_pays(tiles_pay):
    q, e = weight(50, 100), weight(2, 16, 40)
    y = kbit.linear(torch.ones(1, 100), q)
    assert q.tiled is not None
    tiled = q.tiled
    assert torch.equal(kbit.linear(torch.ones(1, 100), q), y)
    assert q.tiled is tiled
    kbit.grouped_linear(torch.ones(2, 40), e, torch.tensor([0, 1, 2], dtype=torch.int32))
    assert e.tiled is not None
    with pytest.raises(ValueError, match="x has 3 features"):
        kbit.linear(torch.ones(1, 3), weight(8, 64))


def test_tracing_leaves_the_form_alone(tiles_pay):
    q = weight(50, 100)
    x = torch.randn(2, 100)
    compiled = torch.compile(lambda x: kbit.linear(x, q), fullgraph=True)
    y = compiled(x)
    assert q.tiled is None
    q.tile()
    torch.testing.assert_close(compiled(x), y, rtol=1e-5, atol=1e-5)


def test_what_a_cuda_graph_recorded_stays(tiles_pay, monkeypatch):
    q = weight(50, 100)
    q.__dict__["stays_canonical"] = True
    kbit.linear(torch.ones(1, 100), q)
    assert q.tiled is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    other = weight(50, 100)
    assert not forms.should_tile(other, "linear", torch.device("cuda", 0), torch.uint8)
    assert other.stays_canonical
    assert not weight(2, 2).stays_canonical
    assert other.tile().tiled is not None, "who asks for it gets it"


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 70),
    k=st.integers(1, 140),
    bits=st.sampled_from(SUPPORTED_BITS),
    m=st.integers(0, 4),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_both_forms_multiply_alike(n, k, bits, m, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    q = kbit.quantize(torch.randn(n, k, generator=generator), bits=bits)
    x = torch.randn(m, k, generator=generator).to(dtype)
    w = kbit.dequantize(q, dtype).double()
    y = kbit.linear(x, q.tile())
    exact = x.double() @ w.T
    # float32 sums of k products, in any order, and one rounding to x's dtype.
    bound = (x.double().abs() @ w.abs().T) * k * 2.0**-23 + exact.abs() * torch.finfo(dtype).eps + 1e-30
    assert ((y.double() - exact).abs() <= bound).all()


def test_backends_get_aligned_contiguous_tiles_and_no_copy_of_such(monkeypatch) -> None:
    """The copy engine takes multiples of 16 bytes; kernels may read weights before a copy is done."""
    fenced = []
    monkeypatch.setattr("kbit.backends.cuda.weights.fenced", lambda weight: fenced.append(weight) or weight)
    q = kbit.quantize(torch.randn(32, 128), bits=4).tile()
    given = q.tiled, q.codebook, q.scale
    assert all(mine is theirs for mine, theirs in zip(dispatch_tiled._weight(*given), given, strict=True))
    assert not fenced

    memory = torch.empty(q.tiled.numel() + 1, dtype=torch.int32)
    odd = memory[1:].view(q.tiled.shape).copy_(q.tiled)
    wide = q.tiled.repeat(1, 2, 1)[:, : q.tiled.shape[1]]
    for tiles in (odd, wide):
        found, *_ = dispatch_tiled._weight(tiles, *given[1:])
        assert found.is_contiguous()
        assert found.data_ptr() % 16 == 0
        assert torch.equal(found, q.tiled)
        assert fenced.pop() is found
