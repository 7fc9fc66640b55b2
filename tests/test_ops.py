"""The ops: schemas under opcheck, traced and eager alike, gradients, `out=`, and every refusal."""

import copy
import importlib
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import kbit
from kbit.format import SUPPORTED_BITS
from kbit.format.scales import ABSMAX_FORMATS, AbsmaxFormat

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def weight_parts(q):
    return q.packed, q.absmax, q.codebook, q.scale


@pytest.fixture
def dense():
    return kbit.quantize(torch.randn(48, 72, generator=torch.Generator().manual_seed(1)), bits=3)


@pytest.fixture
def experts():
    return kbit.quantize(torch.randn(4, 24, 40, generator=torch.Generator().manual_seed(2)), bits=4)


def opcheck_cases():
    q = kbit.quantize(torch.randn(48, 72), bits=3)
    e = kbit.quantize(torch.randn(4, 24, 40), bits=4)
    x, bias, rows = torch.randn(5, 72), torch.randn(48), torch.randn(9, 40)
    offsets = torch.tensor([0, 2, 2, 7, 9], dtype=torch.int32)
    ops = torch.ops.kbit
    dense, stack, ids = weight_parts(q), weight_parts(e), torch.tensor([[1, 2], [0, 47]])
    return {
        "quantize": (ops.quantize.default, (torch.randn(5, 40), kbit.normal_float(3), 3, "e4m4", True), {}),
        "dequantize": (ops.dequantize.default, (*dense, 72, torch.bfloat16), {}),
        "dequantize.out": (ops.dequantize.out, (*dense, 72, torch.float32), {"out": torch.empty(48, 72)}),
        "linear": (ops.linear.default, (x, *dense, bias, 72), {}),
        "linear.out": (ops.linear.out, (x, *dense, None, 72), {"out": torch.empty(5, 48)}),
        "linear_train": (
            ops.linear_train.default,
            (x.clone().requires_grad_(), *dense, bias.clone().requires_grad_(), 72),
            {},
        ),
        "linear_grad_input": (ops.linear_grad_input.default, (torch.randn(5, 48), *dense, 72), {}),
        "grouped_linear": (ops.grouped_linear.default, (rows, *stack, offsets, 40), {}),
        "grouped_linear.out": (
            ops.grouped_linear.out,
            (rows, *stack, offsets, 40),
            {"out": torch.empty(9, 24)},
        ),
        "grouped_linear_train": (
            ops.grouped_linear_train.default,
            (rows.clone().requires_grad_(), *stack, offsets, 40),
            {},
        ),
        "grouped_linear_grad_input": (
            ops.grouped_linear_grad_input.default,
            (torch.randn(9, 24), *stack, offsets, 40),
            {},
        ),
        "embedding": (ops.embedding.default, (ids, *dense, 72, torch.float16), {}),
        "embedding.out": (
            ops.embedding.out,
            (ids, *dense, 72, torch.float16),
            {"out": torch.empty(2, 2, 72, dtype=torch.float16)},
        ),
    }


@pytest.mark.parametrize("name", sorted(opcheck_cases()))
def test_opcheck(name):
    op, args, kwargs = opcheck_cases()[name]
    torch.library.opcheck(op, args, kwargs)


def test_every_op_is_checked():
    from kbit.ops.schemas import SCHEMAS

    checked = {name.removesuffix(".out") for name in opcheck_cases()}
    assert checked == {"quantize", *SCHEMAS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_one_hot_activations_return_the_decoded_weights_exactly(bits, dtype):
    q = kbit.quantize(torch.randn(19, 100), bits=bits)
    assert torch.equal(kbit.linear(torch.eye(100, dtype=dtype), q), kbit.dequantize(q, dtype).T)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (5,), (2, 0), (2, 3)])
def test_linear_takes_any_leading_shape(dense, rows):
    x = torch.randn(*rows, 72)
    y = kbit.linear(x, dense, torch.ones(48))
    assert y.shape == (*rows, 48)
    torch.testing.assert_close(y, x @ kbit.dequantize(dense).T + 1, rtol=1e-5, atol=1e-5)


def test_linear_takes_strided_activations(dense):
    x = torch.randn(72, 6).t()
    assert torch.equal(kbit.linear(x, dense), kbit.linear(x.contiguous(), dense))
    wide = torch.randn(6, 144)[:, ::2]
    assert torch.equal(kbit.linear(wide, dense), kbit.linear(wide.contiguous(), dense))


def test_compile_fullgraph_with_dynamic_rows(dense):
    compiled = torch.compile(lambda x: kbit.linear(x, dense).relu(), fullgraph=True, dynamic=True)
    for rows in (2, 3, 9):
        x = torch.randn(rows, 72)
        assert torch.equal(compiled(x), kbit.linear(x, dense).relu())


def test_compile_with_every_size_symbolic(dense):
    compiled = torch.compile(torch.ops.kbit.linear, fullgraph=True, dynamic=True, backend="aot_eager")
    parts = (dense.packed, dense.absmax, dense.codebook, dense.scale)
    for rows in (2, 3):
        x = torch.randn(rows, 72)
        assert torch.equal(compiled(x, *parts, None, 72), kbit.linear(x, dense))


def test_compile_fullgraph_grouped_and_out(experts):
    offsets = torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32)
    out = torch.empty(6, 24)

    @torch.compile(fullgraph=True)
    def run(x):
        kbit.grouped_linear(x, experts, offsets, out=out)
        return out + 1

    x = torch.randn(6, 40)
    assert torch.equal(run(x), kbit.grouped_linear(x, experts, offsets) + 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_of_linear(dense, compiled):
    def run(x, bias):
        return kbit.linear(x, dense, bias)

    function = torch.compile(run, fullgraph=True) if compiled else run
    x, bias = torch.randn(2, 3, 72, requires_grad=True), torch.randn(48, requires_grad=True)
    grad = torch.randn(2, 3, 48)
    function(x, bias).backward(grad)
    torch.testing.assert_close(x.grad, grad @ kbit.dequantize(dense), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(bias.grad, grad.sum((0, 1)))


def test_gradients_of_grouped_linear(experts):
    x = torch.randn(7, 40, requires_grad=True)
    offsets = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    grad = torch.randn(7, 24)
    kbit.grouped_linear(x, experts, offsets).backward(grad)
    w = kbit.dequantize(experts)
    owner = [0, 0, 0, 2, 2, 3]
    expected = torch.stack([*(grad[row] @ w[expert] for row, expert in enumerate(owner)), torch.zeros(40)])
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["canonical", "tiled"])
@pytest.mark.parametrize(("n", "m"), [(0, 3), (0, 0), (8, 0)])
def test_gradients_of_nothing_are_zero(n, m, form):
    q, e = kbit.quantize(torch.randn(n, 64)), kbit.quantize(torch.randn(2, n, 64))
    if form == "tiled":
        q.tile(), e.tile()
    x, rows = (torch.randn(m, 64, requires_grad=True) for _ in range(2))
    kbit.linear(x, q).sum().backward()
    kbit.grouped_linear(rows, e, torch.tensor([0, m // 2, m], dtype=torch.int32)).sum().backward()
    assert torch.equal(x.grad, torch.zeros(m, 64))
    assert torch.equal(rows.grad, torch.zeros(m, 64))


@pytest.mark.parametrize("form", ["canonical", "tiled"])
def test_rows_without_experts_are_zero(form):
    q = kbit.quantize(torch.randn(0, 8, 64))
    if form == "tiled":
        q.tile()
    x = torch.randn(3, 64, requires_grad=True)
    y = kbit.grouped_linear(x, q, torch.tensor([2], dtype=torch.int32))
    y.sum().backward()
    assert torch.equal(y, torch.zeros(3, 8))
    assert torch.equal(x.grad, torch.zeros(3, 64))


@pytest.mark.parametrize("form", ["canonical", "tiled"])
def test_gradient_ops_called_directly_check_the_same(dense, experts, form):
    grad, offsets = torch.randn(9, 24), torch.tensor([0, 2, 2, 7, 9], dtype=torch.int32)
    if form == "tiled":
        suffix, stack, sizes = "_tiled", (experts.tile().tiled, experts.codebook, experts.scale), (24, 40)
    else:
        suffix, stack, sizes = "", weight_parts(experts), (40,)
    plain = getattr(torch.ops.kbit, f"linear{suffix}_grad_input")
    grouped = getattr(torch.ops.kbit, f"grouped_linear{suffix}_grad_input")
    with pytest.raises(ValueError, match=r"takes weight \[N, K\], got weight \(4, 24, 40\)"):
        plain(grad, *stack, *sizes)
    with pytest.raises(ValueError, match=r"gradient \[T, N\], got .* gradient \(1, 9, 24\)"):
        grouped(grad[None], *stack, offsets, *sizes)
    with pytest.raises(ValueError, match=r"4 experts need expert_offsets of shape \(5,\), got \(4,\)"):
        grouped(grad, *stack, offsets[:-1], *sizes)
    with pytest.raises(TypeError, match="expert_offsets must be int32, got torch.int64"):
        grouped(grad, *stack, offsets.long(), *sizes)
    with pytest.raises(ValueError, match="x has 23 features, the weight expects 24"):
        grouped(grad[:, 1:], *stack, offsets, *sizes)


@pytest.mark.parametrize("form", ["canonical", "tiled"])
@pytest.mark.parametrize("op", ["linear", "grouped_linear"])
def test_gradients_can_be_differentiated_again(dense, experts, op, form):
    q = dense if op == "linear" else experts
    w = kbit.dequantize(q)
    if form == "tiled":
        q.tile()
    offsets = torch.tensor([0, 2, 2, 4, 5], dtype=torch.int32)
    owner = [0, 0, 2, 2, 3]

    def product(x, quantized):
        if op == "linear":
            return kbit.linear(x, q) if quantized else x @ w.T
        if quantized:
            return kbit.grouped_linear(x, q, offsets)
        return torch.stack([x[row] @ w[expert].T for row, expert in enumerate(owner)])

    start, results = torch.randn(5, w.shape[-1]) * 0.1, []
    for quantized in (True, False):
        x = start.clone().requires_grad_()
        (first,) = torch.autograd.grad(product(x, quantized).tanh().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        (third,) = torch.autograd.grad(second.square().sum(), x)
        results.append((first.detach(), second.detach(), third))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("form", ["canonical", "tiled"])
@pytest.mark.parametrize("moving", ["x", "bias"])
def test_forward_mode_is_refused(dense, experts, form, moving):
    if form == "tiled":
        dense.tile()
        experts.tile()
    x, bias, offsets = torch.randn(2, 72), torch.randn(48), torch.tensor([0, 1, 1, 1, 2], dtype=torch.int32)
    refused = pytest.raises(NotImplementedError, match=r"no forward-mode derivative.*\(mlp\.up\)")
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(kbit.linear(x, dense, bias), kbit.linear(x, dense, bias))  # without a tangent
        if moving == "x":
            x = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            rows = torch.autograd.forward_ad.make_dual(torch.ones(2, 40), torch.ones(2, 40))
            with refused:
                kbit.grouped_linear(rows, experts, offsets, where="mlp.up")
        else:
            bias = torch.autograd.forward_ad.make_dual(bias, torch.ones_like(bias))
        with refused:
            kbit.linear(x, dense, bias, where="mlp.up")
    with refused:
        torch.func.jvp(lambda x: kbit.linear(x, dense, where="mlp.up"), (torch.ones(72),), (torch.ones(72),))


def test_a_parameter_can_be_quantized_and_leaves_no_gradients_behind():
    q = kbit.quantize(torch.nn.Parameter(torch.randn(8, 64)), codebook=kbit.normal_float(4).requires_grad_())
    assert not any(part.requires_grad for part in weight_parts(q))
    assert not kbit.linear(torch.randn(2, 64), q).requires_grad


def test_quantize_can_be_traced():
    w = torch.randn(8, 64)
    compiled = torch.compile(lambda w: kbit.dequantize(kbit.quantize(w, bits=3)), fullgraph=True)
    assert torch.equal(compiled(w), kbit.dequantize(kbit.quantize(w, bits=3)))


def test_inference_does_not_pass_through_autograd(dense):
    assert kbit.linear(torch.randn(2, 72), dense).grad_fn is None
    with torch.no_grad():
        assert kbit.linear(torch.randn(2, 72, requires_grad=True), dense).grad_fn is None


def test_out_is_written_and_returned(dense):
    out = torch.full((3, 48), float("nan"))
    x = torch.randn(3, 72)
    assert kbit.linear(x, dense, out=out) is out
    assert torch.equal(out, kbit.linear(x, dense))
    decoded = torch.full((48, 72), float("nan"))
    assert kbit.dequantize(dense, out=decoded) is decoded
    assert torch.equal(decoded, kbit.dequantize(dense))
    ids, rows = torch.tensor([[3, 0], [47, 3]]), torch.full((2, 2, 72), float("nan"))
    assert kbit.embedding(ids, dense, out=rows) is rows
    assert torch.equal(rows, kbit.embedding(ids, dense))


def test_autograd_notices_that_out_was_written(dense, experts):
    x, rows, offsets = torch.randn(3, 72), torch.randn(4, 40), torch.arange(5, dtype=torch.int32)
    tiled = copy.copy(dense).tile()
    for out, write in (
        (torch.ones(3, 48), lambda out: kbit.linear(x, dense, out=out)),
        (torch.ones(3, 48), lambda out: kbit.linear(x, tiled, out=out)),
        (torch.ones(48, 72), lambda out: kbit.dequantize(dense, out=out)),
        (torch.ones(4, 24), lambda out: kbit.grouped_linear(rows, experts, offsets, out=out)),
        (torch.ones(2, 72), lambda out: kbit.embedding(torch.tensor([1, 2]), dense, out=out)),
    ):
        product = torch.ones(out.shape, requires_grad=True) * out  # which its gradient needs again
        write(out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize(
    ("call", "before", "after"),
    [
        (kbit.dequantize, (), ()),
        (kbit.linear, (torch.zeros(1, 64),), ()),
        (kbit.grouped_linear, (torch.zeros(1, 64),), (torch.tensor([0, 1], dtype=torch.int32),)),
        (kbit.embedding, (torch.tensor([3]),), (torch.float32,)),
        (kbit.explain, ((1, 64),), ()),
    ],
)
def test_a_weight_that_is_not_quantized_is_refused(call, before, after):
    with pytest.raises(TypeError, match="must be a QuantizedTensor, got Tensor"):
        call(*before, torch.zeros(32, 64), *after)


X, OFFSETS, IDS = torch.zeros(3, 72), torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([1, 2])


NOT_DENSE = {
    "a nested tensor": torch.nested.as_nested_tensor([X[:2], X[:1]]),
    "torch.sparse_coo": X.to_sparse(),
    "list": [1.0],
    "ndarray": np.zeros((3, 72), np.float32),
    "NoneType": None,
    "bool": True,
}
TAKING_TENSORS = (
    ("w", lambda value, q, experts: kbit.quantize(value)),
    ("x", lambda value, q, experts: kbit.linear(value, q)),
    ("bias", lambda value, q, experts: kbit.linear(X, q, value)),
    ("out", lambda value, q, experts: kbit.linear(X, q, out=value)),
    ("out", lambda value, q, experts: kbit.dequantize(q, out=value)),
    ("x", lambda value, q, experts: kbit.grouped_linear(value, experts, OFFSETS)),
    ("expert_offsets", lambda value, q, experts: kbit.grouped_linear(X[:, :40], experts, value)),
    ("ids", lambda value, q, experts: kbit.embedding(value, q, torch.float32)),
)


@pytest.mark.parametrize(
    ("name", "call", "wrong"),
    [
        (name, call, wrong)
        for name, call in TAKING_TENSORS
        for wrong in NOT_DENSE
        if wrong != "NoneType" or name not in ("bias", "out")  # None is their default
    ],
)
def test_what_is_no_dense_tensor_is_named(dense, experts, name, call, wrong):
    with pytest.raises(TypeError, match=rf"\w+: {name} must be .*, got {wrong}"):
        call(NOT_DENSE[wrong], dense, experts)


@pytest.mark.parametrize("wrong", [None, "float32", np.float32, torch.float64, 1.0], ids=str)
def test_a_dtype_that_is_none_of_torch_s_is_named(dense, wrong):
    for call in (
        lambda: kbit.dequantize(dense, wrong),
        lambda: kbit.embedding(IDS, dense, wrong),
        lambda: kbit.explain((1, 72), dense, wrong),
    ):
        with pytest.raises(TypeError, match=r"dtype must be float32, float16 or bfloat16, .* Pass one of"):
            call()


@pytest.mark.parametrize("wrong", [X, np.zeros(2), 72, None, "72", (-1, 72), (1.0, 72), [float("nan"), 72]])
def test_explain_refuses_what_is_no_shape(dense, wrong):
    with pytest.raises(TypeError, match=r"explain: x_shape must be sizes such as \(1, 72\), got"):
        kbit.explain(wrong, dense)


def test_explain_refuses_what_the_product_of_experts_does():
    stack = kbit.quantize(torch.randn(2, 4, 72))
    with pytest.raises(ValueError, match=r"explain: x of experts is \[T, 72\].* got \(2, 3, 72\). Flatten"):
        kbit.explain((2, 3, 72), stack)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"search": "no"}, "search must be True or False"), ({"scale": torch.uint8}, "unknown absmax format")],
)
def test_bad_options_of_quantize_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        kbit.quantize(torch.zeros(2, 32), **options)


def test_bad_out_is_refused(dense):
    x = torch.randn(3, 72)
    with pytest.raises(ValueError, match=r"out must be contiguous with shape \(3, 48\)"):
        kbit.linear(x, dense, out=torch.empty(3, 47))
    with pytest.raises(TypeError, match=r"out must be torch.float32, got torch.float16"):
        kbit.linear(x, dense, out=torch.empty(3, 48).half())
    with pytest.raises(ValueError, match="contiguous"):
        kbit.linear(x, dense, out=torch.empty(48, 3).t())
    with pytest.raises(ValueError, match="out= cannot be combined with gradients"):
        kbit.linear(x.requires_grad_(), dense, out=torch.empty(3, 48))
    with pytest.raises(ValueError, match="dequantize: out= cannot be combined with gradients"):
        kbit.dequantize(dense, out=torch.empty(48, 72, requires_grad=True))


@pytest.mark.parametrize("traced", [False, True])
def test_bad_activations_are_refused_with_the_layer_name_eager_and_traced(dense, traced):
    def run(x, bias=None):
        return kbit.linear(x, dense, bias, where="layers.3.up_proj")

    function = torch.compile(run, fullgraph=True) if traced else run
    cases = [
        ((torch.randn(2, 73),), "x has 73 features, the weight expects 72"),
        ((torch.randn(2, 72).double(),), "x must be float32, float16 or bfloat16, got torch.float64"),
        ((torch.ones(2, 72, dtype=torch.int32),), "got torch.int32"),
        ((torch.randn(2, 72), torch.randn(47)), r"bias must have shape \(48,\), got \(47,\)"),
        ((torch.randn(2, 72), torch.randn(48).half()), "bias is torch.float16"),
    ]
    for arguments, message in cases:
        with pytest.raises(Exception, match=message) as error:
            function(*arguments)
        assert "layers.3.up_proj" in str(error.value)


def test_devices_that_differ_are_refused(dense):
    with pytest.raises(ValueError, match="x is on meta, the weight on cpu"):
        kbit.linear(torch.empty(2, 72, device="meta"), dense)


def test_ops_called_directly_check_the_same(dense):
    with pytest.raises(ValueError, match="x has 5 features, the weight expects 72"):
        torch.ops.kbit.linear(torch.randn(2, 5), *weight_parts(dense), None, 72)
    with pytest.raises(
        ValueError, match="128 in-features at 3 bits need 12 words and 4 scales a row, got 9 and 3"
    ):
        torch.ops.kbit.linear(torch.randn(2, 128), *weight_parts(dense), None, 128)


def test_a_stack_and_a_matrix_are_not_mixed_up(dense, experts):
    with pytest.raises(ValueError, match="Use grouped_linear"):
        kbit.linear(torch.randn(2, 40), experts)
    with pytest.raises(ValueError, match="Use linear"):
        kbit.grouped_linear(torch.randn(2, 72), dense, torch.tensor([0, 2], dtype=torch.int32))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1, 2, 3], r"need expert_offsets of shape \(5,\)"),
        ([0, 3, 2, 4, 5], "must ascend"),
        ([0, 1, 2, 3, 99], r"within 0\.\.5"),
        ([-1, 1, 2, 3, 4], "must ascend"),
    ],
)
def test_bad_offsets_are_refused(experts, offsets, message):
    with pytest.raises(ValueError, match=message):
        kbit.grouped_linear(torch.randn(5, 40), experts, torch.tensor(offsets, dtype=torch.int32))
    with pytest.raises(TypeError, match="must be int32"):
        kbit.grouped_linear(torch.randn(5, 40), experts, torch.tensor([0, 1, 2, 3, 4]))


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embedding_returns_decoded_rows(dense, ids_dtype):
    ids = torch.tensor([[3, 47], [0, 3]], dtype=ids_dtype)
    assert torch.equal(
        kbit.embedding(ids, dense, torch.bfloat16), kbit.dequantize(dense, torch.bfloat16)[ids.long()]
    )
    assert kbit.embedding(torch.empty(0, dtype=torch.int64), dense, torch.float32).shape == (0, 72)


@pytest.mark.parametrize("bad", [-1, 48])
def test_embedding_refuses_ids_outside_the_table(dense, bad):
    with pytest.raises(IndexError, match=rf"id {bad} .*outside"):
        kbit.embedding(torch.tensor([0, bad]), dense, torch.float32)
    with pytest.raises(TypeError, match="ids must be int32 or int64"):
        kbit.embedding(torch.tensor([0.0]), dense, torch.float32)
    with pytest.raises(IndexError, match="1 ids are looked up in a table of no rows"):
        kbit.embedding(torch.tensor([bad]), kbit.quantize(torch.randn(0, 72)), torch.float32)


def test_a_format_of_scales_that_kernels_do_not_know_is_left_to_the_reference(monkeypatch):
    form = AbsmaxFormat("bfloat16", torch.bfloat16, 2.0**-126, 3.38e38)
    monkeypatch.setitem(ABSMAX_FORMATS, form.name, form)
    q, x = kbit.quantize(torch.randn(4, 72), scale="bfloat16"), torch.randn(3, 72)
    torch.testing.assert_close(kbit.linear(x, q), x @ kbit.dequantize(q, torch.float32).T)
    assert "know no block scales of torch.bfloat16" in kbit.explain(x.shape, q)


def test_backend_can_be_forced_and_a_bad_name_is_explained(dense, monkeypatch):
    x = torch.randn(4, 72)
    expected = kbit.linear(x, dense)
    monkeypatch.setenv("KBIT_BACKEND", "reference")
    torch.testing.assert_close(kbit.linear(x, dense), expected, rtol=1e-5, atol=1e-5)
    monkeypatch.setenv("KBIT_BACKEND", "tpu")
    with pytest.raises(ValueError, match="KBIT_BACKEND is 'tpu'; known: cuda, cpu, reference"):
        kbit.linear(x, dense)
    monkeypatch.setenv("KBIT_BACKEND", "cpu")
    w = torch.randn(4, 32)
    with pytest.raises(ValueError, match="KBIT_BACKEND=cpu cannot run quantize"):
        kbit.quantize(w, scale="float32")
    monkeypatch.setenv("KBIT_BACKEND", "cuda")
    with pytest.raises(
        ValueError, match="cuda cannot run linear: the CUDA kernels need CUDA tensors, got cpu"
    ):
        kbit.linear(x, dense)


def test_without_kernels_the_reference_answers_and_says_so_once():
    code = """
import sys, warnings
sys.modules["kbit._cpu"] = None  # importing it fails, as where no compiler was found
import torch, kbit
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    q = kbit.quantize(torch.randn(8, 64), bits=3)
    kbit.linear(torch.randn(2, 64), q)
print(*(str(warning.message) for warning in caught if "kbit" in str(warning.message)), sep="\\n")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (message,) = result.stdout.splitlines()
    assert message.endswith("the slower reference backend is used. `kbit doctor` says what to do.")


def test_cuda_tensors_without_cuda_kernels_are_the_reference_s_and_it_says_so_once(monkeypatch):
    module = importlib.import_module("kbit.dispatch.backends")
    monkeypatch.setattr(module.cuda, "unavailable_reason", lambda *_: "the GPU is older than sm_80")
    monkeypatch.setattr(module, "_warned", set())
    device = torch.device("cuda", 0)
    with pytest.warns(UserWarning, match="its CUDA kernels: the GPU is older than sm_80.*`kbit doctor`"):
        assert module.backend_for("linear", device, torch.uint8).name == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.backend_for("linear", device, torch.uint8).name == "reference"
    assert not module.tiles_pay("linear", device)
    monkeypatch.setattr(module.cuda, "unavailable_reason", lambda *_: None)
    assert module.backend_for("linear_tiled", device, torch.uint8).name == "cuda"
    assert module.backend_for("quantize", device, torch.float16).name == "reference"
    assert module.tiles_pay("linear", device)
    assert not module.tiles_pay("linear", torch.device("cpu"))
    monkeypatch.setenv("KBIT_BACKEND", "reference")
    assert not module.tiles_pay("linear", device)


def test_a_gpu_that_is_too_old_leaves_the_kernels_to_the_others(monkeypatch):
    module = importlib.import_module("kbit.dispatch.backends")
    driver = importlib.import_module("kbit.backends.cuda.driver")
    capabilities = [(9, 0), (7, 5)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(driver, "device_arch", lambda index: driver.arch_of(*capabilities[index]))
    monkeypatch.setattr(module, "_warned", set())
    module.cuda.unavailable_reason.cache_clear()
    try:
        assert module.cuda.available()
        assert module.backend_for("linear", torch.device("cuda", 0), torch.uint8).name == "cuda"
        with pytest.warns(UserWarning, match=r"need sm_80 or newer.*=reference\. `kbit doctor`"):
            assert module.backend_for("linear", torch.device("cuda", 1), torch.uint8).name == "reference"
        assert module.tiles_pay("linear", torch.device("cuda", 0))
        assert not module.tiles_pay("linear", torch.device("cuda", 1))
    finally:
        module.cuda.unavailable_reason.cache_clear()


def test_a_gpu_that_is_newer_than_the_compiler_is_left_to_another_backend(monkeypatch):
    module = importlib.import_module("kbit.dispatch.backends")
    compiler = importlib.import_module("kbit.backends.cuda.compiler")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.cuda.driver, "device_arch", lambda index: compiler.arch_of(99, 0))
    module.cuda.unavailable_reason.cache_clear()
    try:
        assert "cannot compile for sm_990a" in (module.cuda.unavailable_reason(0) or "")
        assert "pip install -U nvidia-cuda-nvrtc" in (module.cuda.unavailable_reason(0) or "")
        with pytest.warns(UserWarning, match=r"cannot compile for sm_990a.*`kbit doctor`"):
            assert module.backend_for("linear", torch.device("cuda", 0), torch.uint8).name == "reference"
    finally:
        module.cuda.unavailable_reason.cache_clear()


def test_explain_says_what_a_product_does(dense, experts, monkeypatch):
    monkeypatch.delenv("KBIT_BACKEND", raising=False)
    cpu = importlib.import_module("kbit.backends.cpu")
    if cpu.available():
        assert kbit.explain((1, 40), experts).endswith(f"instruction set {cpu.isa()}"), (
            "no other for short rows"
        )
        monkeypatch.setattr(cpu, "panels_win", lambda *_: True)
        assert kbit.explain((99, 72), dense).endswith("for decoding; torch multiplies")
    assert kbit.explain((1, 72), dense.tile()).endswith("backend reference: taken"), "tiles are for GPUs"
    with pytest.raises(ValueError, match="explain: activation must be None or 'silu_and_mul', got 'gelu'"):
        kbit.explain((1, 72), dense, activation="gelu")
    with pytest.raises(TypeError, match="explain: dtype must be float32"):
        kbit.explain((1, 72), dense, torch.float64)
