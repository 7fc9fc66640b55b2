"""Messages of errors: who was called, the layer, what came, and what to do; and what is accepted instead."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import kbit
from kbit import nvfp4
from kbit.integrations.peft import merge
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear
from kbit.nvfp4.layers import NVFP4Experts
from kbit.nvfp4.layers.parts import NVFP4Settings

ops = torch.ops.kbit
OFFSETS = torch.tensor([0, 2, 3], dtype=torch.int32)


class Experts(nn.Module):
    """Laid out as transformers' fused experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 48, 32) / 7)
        self.down_proj = nn.Parameter(torch.randn(4, 32, 24) / 5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


@pytest.fixture(scope="module")
def given() -> SimpleNamespace:
    """One of everything that the calls below take."""
    torch.manual_seed(0)
    experts, policy = Experts(), kbit.QuantizationPolicy()
    return SimpleNamespace(
        q=kbit.quantize(torch.randn(64, 32)),
        stack=kbit.quantize(torch.randn(2, 64, 32)),
        t=nvfp4.quantize_nvfp4(torch.randn(64, 32)),
        ts=nvfp4.quantize_nvfp4(torch.randn(4, 64, 32)),
        x=torch.randn(3, 32),
        raw=experts,
        experts=KbitExperts.from_experts(experts, 4, policy, name="mlp.experts"),
        model=nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)),
        plain=nn.Linear(32, 64, bias=False),
        table=KbitEmbedding.from_embedding(nn.Embedding(64, 32), name="wte"),
    )


# name -> (call, error, expression that the message has)
REFUSED = {
    # Experts have two weights.
    "dtype as name": (
        lambda g: g.experts.dequantize(torch.float16),
        TypeError,
        r"one of gate_up_proj, down_proj, got torch\.float16 \(mlp\.experts\)\. Call dequantize\(name, d",
    ),
    "no such weight": (
        lambda g: g.experts.quantized("x"),
        ValueError,
        r"name must be one of gate_up_proj, down_proj, got 'x' \(mlp\.experts\)",
    ),
    "ids of experts": (
        lambda g: g.experts(g.x, torch.zeros(3, 2), torch.ones(3, 2)),
        TypeError,
        r"top_k_index must be int32 or int64, got torch\.float32 \(mlp\.experts\)\. Is",
    ),
    "ids of NVFP4": (
        lambda g: NVFP4Experts.from_experts(g.raw, NVFP4Settings(), "moe")(
            g.x, torch.zeros(3, 2), torch.ones(3, 2)
        ),
        TypeError,
        r"top_k_index must be int32 or int64, got torch\.float32 \(moe\)",
    ),
    "no policy": (
        lambda g: KbitExperts.from_experts(g.raw, 3, None),
        TypeError,
        "KbitExperts.from_experts: policy must be a KbitConfig or QuantizationPolicy, got NoneType. For",
    ),
    "dict as policy": (lambda g: KbitExperts.from_experts(g.raw, 3, {}), TypeError, "policy .* got dict"),
    # A wrong first argument.
    "compile no model": (
        lambda g: kbit.compile_kernels("m"),
        TypeError,
        "model must be an nn.Module, got str",
    ),
    "scripted": (
        lambda g: kbit.quantize_model(
            torch.jit.trace(torch.nn.Linear(4, 4), torch.ones(1, 4)), kbit.KbitConfig()
        ),
        TypeError,
        "the model was made by torch.jit, and its layers cannot be replaced. Quantize the module",
    ),
    "compile text": (
        lambda g: kbit.compile_kernels(g.model, tokens="x"),
        TypeError,
        r"tokens must be a whole number or a list of them, got 'x'\. For example: tokens=\[1, 128\]",
    ),
    "compile fraction": (lambda g: kbit.compile_kernels(g.model, [1.5]), TypeError, r"got \[1\.5\]"),
    "compile no token": (lambda g: kbit.compile_kernels(g.model, 0), ValueError, "from 1 on, got 0. Leave"),
    "compile dtype": (
        lambda g: kbit.compile_kernels(g.model, dtype="bf16"),
        TypeError,
        "compile_kernels: dtype must be float32, .*, got 'bf16'. Pass one of torch's",
    ),
    "merge": (lambda g: merge("x"), TypeError, "merge: str is no peft model.* Give what peft.get_peft_model"),
    "modelopt": (
        lambda g: nvfp4.from_modelopt("/nowhere", "up"),
        FileNotFoundError,
        "from_modelopt: there is no /nowhere. Give a safetensors file or a model folder",
    ),
    "compressed": (
        lambda g: nvfp4.from_compressed_tensors("/nowhere", "up"),
        FileNotFoundError,
        "from_compressed_tensors: there is no /nowhere. Give",
    ),
    "gguf": (
        lambda g: nvfp4.from_gguf("/nowhere", "up"),
        FileNotFoundError,
        "from_gguf: there is no /nowhere. Give a GGUF file",
    ),
    # What to do.
    "format": (
        lambda g: kbit.quantize(g.x, scale="fp16"),
        ValueError,
        r"format 'fp16' \(quantize\); known: e4m4, float16, float32\. Give one",
    ),
    "out shape": (
        lambda g: kbit.linear(g.x, g.q, out=torch.empty(3, 63), where="up"),
        ValueError,
        r"out must be contiguous with shape \(3, 64\) on cpu, .* on cpu \(up\)\. Make it with torch\.empty",
    ),
    "out dtype": (
        lambda g: kbit.linear(g.x, g.q, out=torch.empty(3, 64).half(), where="up"),
        TypeError,
        r"out must be torch\.float32, got torch\.float16 \(up\)\. Make",
    ),
    "out of silu": (
        lambda g: kbit.linear(g.x, g.q, out=torch.empty(3, 64), activation="silu_and_mul", where="up"),
        ValueError,
        r"shape \(3, 32\).*\(up\)\. Make",
    ),
    "out negated": (
        lambda g: kbit.linear(g.x, g.q, out=torch.zeros(3, 64, dtype=torch.cfloat).conj().imag, where="up"),
        ValueError,
        r"out must hold its values as they are, got a view that PyTorch negates .* \(up\)\. Make it with",
    ),
    "out conjugate": (
        lambda g: kbit.dequantize(g.q, out=torch.zeros(64, 64, dtype=torch.cfloat).conj()),
        ValueError,
        "out must hold its values as they are, got a view that PyTorch .* conjugates",
    ),
    "out of what": (lambda g: kbit.linear(g.x, g.q, out=0, where="up"), TypeError, r"got int \(up\)"),
    "out and gradients": (
        lambda g: kbit.linear(g.x.clone().requires_grad_(), g.q, out=torch.empty(3, 64), where="up"),
        ValueError,
        r"gradients \(up\)\. Drop",
    ),
    "offsets": (
        lambda g: kbit.grouped_linear(g.x, g.stack, OFFSETS.flip(0), where="moe"),
        ValueError,
        r"expert_offsets must ascend .*, got \[3, 2, 0\] \(moe\)\. Sort rows",
    ),
    "id": (
        lambda g: kbit.embedding(torch.tensor([64]), g.q),
        IndexError,
        r"id 64 at position 0 is outside 0\.\.63\. Are the ids those of another",
    ),
    "id of a layer": (
        lambda g: g.table(torch.tensor([-1])),
        IndexError,
        r"outside 0\.\.63 \(wte\)\. Are the ids",
    ),
    "layout": (
        lambda g: nvfp4.repack_nvfp4(g.t, "x"),
        ValueError,
        'repack_nvfp4: layout must be one of nv, .*, got \'x\'. Use "nv", or "tiled"',
    ),
    "layout of a layer": (
        lambda g: nvfp4.quantize_nvfp4(g.x, layout="x", where="up"),
        ValueError,
        r"quantize_nvfp4: layout must be .*, got 'x' \(up\)\. Use",
    ),
    "norm": (lambda g: nvfp4.rmsnorm(g.x, g.x, 0.0), ValueError, r"rmsnorm: x must be .*\)\. Flatten tokens"),
    "norm and codes": (
        lambda g: nvfp4.rmsnorm_quantize_nvfp4(g.x, g.x, 0.0),
        ValueError,
        "rmsnorm_quantize_nvfp4: x must be",
    ),
    "silu": (
        lambda g: nvfp4.silu_mul(g.x[0]),
        ValueError,
        r"silu_mul: gate_up .* got \(32,\)\. Flatten tokens",
    ),
    "combine": (
        lambda g: nvfp4.moe_combine(g.x[None], torch.ones(2, 3)),
        ValueError,
        r"moe_combine: y must be .*\)\. Are the weights p those of the same",
    ),
    "top_k": (
        lambda g: ops.moe_route(g.x, 33, "softmax", True),
        ValueError,
        r"top_k must be in 1\.\.32, .*, got 33\. Is it",
    ),
    "scoring": (lambda g: ops.moe_route(g.x, 2, "relu", True), ValueError, "got 'relu'. Take the one of"),
    "explain": (
        lambda g: kbit.explain((3, 31), g.q),
        ValueError,
        r"explain: x of shape \(3, 31\) does not fit .*\. Give sizes that end with 32",
    ),
    # The name of the layer.
    "format of a layer": (
        lambda g: KbitLinear.from_linear(g.plain, absmax_format="fp16", name="foo"),
        ValueError,
        r"unknown absmax format 'fp16' \(foo\.weight\); known",
    ),
    "format of a new layer": (
        lambda g: KbitLinear(32, 32, absmax_format="fp16", name="foo"),
        ValueError,
        r"'fp16' \(foo\)",
    ),
    "bits": (
        lambda g: kbit.quantize(g.x, 9, where="foo"),
        ValueError,
        r"bits must be .*, got 9 \(foo\)\. Pick",
    ),
    "codebook": (
        lambda g: kbit.quantize(g.x, codebook="nf4", where="foo"),
        ValueError,
        r"unknown codebook 'nf4'; known: bof, nf \(foo\)\. Give",
    ),
    "levels": (
        lambda g: kbit.quantize(g.x, 2, codebook=[0.0, 0.0, 0.5, 1.0], where="foo"),
        ValueError,
        r"strictly ascending, got \[0\.0, 0\.0, 0\.5, 1\.0\] \(foo\)\. Sort",
    ),
    "no numbers": (
        lambda g: kbit.quantize(g.x, codebook=[None], where="foo"),
        TypeError,
        r"\(foo\): .*\. Give",
    ),
    "max_norm": (
        lambda g: KbitEmbedding.from_embedding(nn.Embedding(4, 32, max_norm=1.0)),
        ValueError,
        r"got max_norm=1\.0\. Leave it out",
    ),
    "max_norm of a layer": (
        lambda g: KbitEmbedding.from_embedding(nn.Embedding(4, 32, max_norm=1.0), name="wte"),
        ValueError,
        r"max_norm=1\.0 \(wte\)\. Leave",
    ),
    # What came.
    "flag": (lambda g: kbit.quantize(g.x, search=1), TypeError, "search must be True or False, got 1. Pass"),
    "quantized twice": (
        lambda g: kbit.quantize(g.q),
        TypeError,
        "w must be a tensor, got QuantizedTensor. It is quantized already: kbit.dequantize decodes it",
    ),
    "NVFP4 quantized": (
        lambda g: kbit.quantize(g.t),
        TypeError,
        "quantized already: kbit.nvfp4.dequantize_nvfp4",
    ),
    "NVFP4 in linear": (
        lambda g: kbit.linear(g.x, g.t, where="up"),
        TypeError,
        "the weight of up must be a QuantizedTensor, got NVFP4Tensor. Use kbit.nvfp4.linear_nvfp4",
    ),
    "codes in NVFP4": (
        lambda g: nvfp4.linear_nvfp4(g.x, g.q),
        TypeError,
        "w must be an NVFP4Tensor, got QuantizedTensor. Use kbit.linear for k-bit weights",
    ),
    "codes of experts in NVFP4": (
        lambda g: nvfp4.moe_gemm_nvfp4(g.x, g.stack, torch.zeros(3, 1).int()),
        TypeError,
        "Use kbit.grouped_linear for k-bit",
    ),
    "bias": (
        lambda g: nvfp4.linear_nvfp4(g.x, g.t, torch.zeros(63)),
        ValueError,
        r"bias must be torch\.float32 \[64\] .*, got torch\.float32 \(63,\)\. Is it that of another layer\?$",
    ),
    "bias dtype": (
        lambda g: nvfp4.linear_nvfp4(g.x, g.t, torch.zeros(64).half()),
        ValueError,
        r"got torch\.float16 \(64,\)\. Cast it to x's dtype\.$",
    ),
    "no columns": (lambda g: kbit.quantize(torch.zeros(4, 0)), ValueError, r"\(4, 0\)\. Leave it as it is"),
    "no columns of NVFP4": (
        lambda g: nvfp4.quantize_nvfp4(torch.zeros(64, 0)),
        ValueError,
        r"\(64, 0\)\. Leave it as it is",
    ),
    "format twice": (
        lambda g: kbit.quantize(g.x, scale="float32", absmax_format="float16", where="up"),
        TypeError,
        r"one setting, got 'float32' and 'float16' \(up\)\. Give one of them",
    ),
    # Samples.
    "sample of other width": (
        lambda g: kbit.quantize_model(g.model, kbit.QuantizationPolicy(), calibration=[g.x, g.x[:, :31]]),
        ValueError,
        r"the model fails on calibration\[1\]: 0 takes \[\.\.\., 32\], got \(3, 31\)\. Give samples",
    ),
    "sample of other names": (
        lambda g: kbit.quantize_model(
            g.model, kbit.QuantizationPolicy(), calibration=[g.x, {"input": g.x, "mask": g.x}]
        ),
        TypeError,
        r"calibration\[1\]: .*unexpected keyword argument 'mask'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_message_says_who_what_and_what_to_do(name: str, given: SimpleNamespace) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call(given)


def test_the_default_weight_of_experts_is_the_first(given: SimpleNamespace) -> None:
    experts = given.experts
    assert torch.equal(experts.dequantize(), experts.dequantize("gate_up_proj", torch.float32))
    assert experts.dequantize(dtype=torch.bfloat16).dtype == torch.bfloat16
    assert experts.dequantize("down_proj").shape == (4, 32, 24)


def test_ids_may_be_what_topk_gives(given: SimpleNamespace) -> None:
    ids = torch.randn(3, 4).topk(2).indices
    assert ids.dtype == torch.int64
    expected = nvfp4.moe_gemm_nvfp4(given.x, given.ts, ids.int())
    assert torch.equal(nvfp4.moe_gemm_nvfp4(given.x, given.ts, ids), expected)
    for have, want in zip(nvfp4.moe_align(ids, 4), nvfp4.moe_align(ids.int(), 4), strict=True):
        assert have.dtype == torch.int32
        assert torch.equal(have, want)
    with pytest.raises(ValueError, match=rf"moe_gemm_nvfp4: ids must be in 0\.\.4, got 0\.\.{2**32}"):
        nvfp4.moe_gemm_nvfp4(given.x, given.ts, torch.tensor([[0], [1], [2**32]]))


def test_one_number_of_tokens_will_do(given: SimpleNamespace) -> None:
    assert kbit.compile_kernels(given.model, tokens=128) == 0
    assert kbit.compile_kernels(given.model, tokens=range(1, 3)) == 0


def test_rows_of_a_table_are_float32_unless_said(given: SimpleNamespace) -> None:
    ids = torch.tensor([3, 1])
    assert torch.equal(kbit.embedding(ids, given.q), kbit.embedding(ids, given.q, torch.float32))


def test_the_format_of_scales_has_the_name_that_layers_have(given: SimpleNamespace) -> None:
    for form in ("e4m4", "float16", "float32"):
        assert kbit.quantize(given.x, absmax_format=form).absmax_format == form
        assert kbit.quantize(given.x, scale=form).absmax_format == form
    assert kbit.quantize(given.x).absmax_format == "e4m4"


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(
    ("level", "message"),
    [(float("nan"), "finite"), (-0.9, "ascending"), (None, "largest magnitude 1, got 0.5")],
)
def test_levels_of_a_rebuilt_weight_are_checked(tiled, level, message, given) -> None:
    q = copy.deepcopy(given.q)
    levels = q.codebook.clone()
    levels = levels / 2 if level is None else levels.index_fill(0, torch.tensor(7), level)
    if tiled:
        q.tile()

    def rebuilt() -> kbit.QuantizedTensor:
        if tiled:
            return kbit.QuantizedTensor.from_tiles(q.tiled, levels, q.scale, q.bits, q.shape)
        return kbit.QuantizedTensor(q.packed, q.absmax, levels, q.scale, q.bits, q.shape)

    with pytest.raises(ValueError, match=message):
        rebuilt()


def test_levels_that_cannot_be_read_are_taken_as_they_are(given: SimpleNamespace) -> None:
    q = given.q
    parts = {name: getattr(q, name) for name in ("packed", "absmax", "codebook", "scale")}

    def rebuilt(parts: dict[str, torch.Tensor]) -> kbit.QuantizedTensor:
        return kbit.QuantizedTensor(**parts, bits=q.bits, shape=q.shape)

    assert rebuilt({name: part.to("meta") for name, part in parts.items()}).device.type == "meta"
    assert q.to("meta").shape == copy.deepcopy(q).shape
    with FakeTensorMode() as mode:
        assert rebuilt({name: mode.from_tensor(part) for name, part in parts.items()}).shape == q.shape
    decode = torch.compile(lambda parts: kbit.dequantize(rebuilt(parts)), fullgraph=True, backend="eager")
    assert torch.equal(decode(parts), kbit.dequantize(q))
