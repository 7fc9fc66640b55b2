"""`kbit::append_heads`: the op, and the attention layers of transformers that it is for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import OlmoConfig, OlmoForCausalLM, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.models.llama.modeling_llama import LlamaAttention

from kbit.integrations.transformers import attention_heads
from kbit.integrations.transformers.attention import shared_heads
from kbit.integrations.transformers.cache_argument import cache_in, cache_name
from kbit.integrations.transformers.step_kernels import step_kernels
from kbit.nn.norm import fuse_norms
from static_steps import heads_alone, steps, take_caches_of_a_cpu
from tiny_models import build

ops = torch.ops.kbit
gpu = pytest.mark.gpu
NORM = (1e-6, False, True)
NAMES = ("query", "key", "value", "query_norm", "key_norm", "cos", "sin", "keys", "values", "length")


def operands(sizes, columns, turned, dtype=torch.float32, device="cpu", normed=True, length=3):
    """The op's tensors by name: [batch, tokens, heads of queries, of keys], room for nine tokens."""

    def normal(*shape):
        return torch.randn(shape).to(device, dtype)

    batch, tokens, heads, kv_heads = sizes
    product = normal(batch, tokens, heads + 2 * kv_heads, columns)
    norms = (normal(columns), normal(columns)) if normed else (None, None)
    angles = normal(1, tokens, turned), normal(1, tokens, turned)
    caches = normal(batch, kv_heads, 9, columns), normal(batch, kv_heads, 9, columns)
    parts = product.split([heads, kv_heads, kv_heads], 2)
    at = torch.tensor(length, device=device)
    return dict(zip(NAMES, (*parts, *norms, *angles, *caches, at), strict=True))


def one_behind_the_other(query, key, value, query_norm, key_norm, cos, sin, keys, values, length, how):
    """The same by three ops."""
    if query_norm is not None:
        query, key = ops.rms_norm(query, query_norm, *how), ops.rms_norm(key, key_norm, *how)
    query, key = ops.rotary(query.transpose(1, 2), key.transpose(1, 2), cos, sin)
    ops.cache_append(keys, values, key, value.transpose(1, 2), length)
    return query, keys, values


def results(tensors, how):
    """Of the op, with caches of its own."""
    tensors = tensors | {name: tensors[name].clone() for name in ("keys", "values")}
    return ops.append_heads(*tensors.values(), *how), tensors["keys"], tensors["values"]


def require_defined(tensors, how):
    have = results(tensors, how)
    assert all(map(torch.equal, have, one_behind_the_other(**tensors, how=how)))


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(1, 1, 4, 2), (2, 3, 2, 1), (3, 1, 3, 3), (0, 1, 2, 1), (1, 0, 2, 1), (1, 1, 2, 0)]),
    st.sampled_from([(8, 8), (24, 16), (7, 2)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([None, NORM, (1e-5, True, False)]),
    st.integers(0, 12),
)
def test_the_definition(sizes, columns, dtype, how, length):
    tensors = operands(sizes, *columns, dtype, normed=how is not None, length=length)
    require_defined(tensors, how or NORM)


GIVEN = operands((2, 1, 4, 2), 8, 8)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": GIVEN["query"][0]}, ValueError, r"query must be \[B, T, heads, D\]"),
        ({"query": GIVEN["query"].long()}, TypeError, "query_norm must be torch.int64"),
        ({"query": GIVEN["query"].long(), "query_norm": None, "key_norm": None}, TypeError, "query"),
        ({"value": GIVEN["value"][..., :4]}, ValueError, r"value must be \(2, 1, 2, 8\) like key"),
        ({"key_norm": None}, ValueError, "both, or neither"),
        ({"key_norm": GIVEN["key_norm"][:4]}, ValueError, r"key_norm must be \[8\] on cpu"),
        ({"query_norm": GIVEN["query_norm"].to("meta")}, ValueError, "on meta"),
        ({"cos": GIVEN["cos"].half()}, TypeError, "cos must be torch.float32"),
        ({"keys": GIVEN["keys"].half()}, TypeError, "its cache torch.float16"),
        ({"length": torch.zeros(2).long()}, TypeError, "length must be one int64"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_belong_together_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.append_heads(*(GIVEN | change).values(), *NORM)


def test_opcheck():
    torch.library.opcheck(ops.append_heads.default, (*GIVEN.values(), *NORM))
    torch.library.opcheck(ops.append_heads.default, tuple((GIVEN | dict.fromkeys(NAMES[3:5])).values()))


# -- layers of transformers ----------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Caches on a CPU count as those of a GPU; the ops that were called."""
    calls = []
    take_caches_of_a_cpu(monkeypatch)
    for name in ("append_heads", "cache_append"):
        own = getattr(ops, name)
        monkeypatch.setattr(ops, name, lambda *given, own=own, name=name: calls.append(name) or own(*given))
    return calls


def quantized_norms(name, dtype=torch.bfloat16):
    model = build(name, torch.float32, spread=False).eval().to(dtype)
    fuse_norms(model)
    return model


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama", 2), ("qwen3", 2), ("qwen3_moe", 2), ("qwen3_next", 1), ("qwen3_5_moe", 1), ("mixtral", 2)],
)
def test_layers_of_transformers_compute_the_same(name, layers, on_cpu):
    model = quantized_norms(name)
    own = steps(model, heads_alone)
    assert not on_cpu
    steps(model, step_kernels)  # tries what the class does
    on_cpu.clear()
    fused = steps(model, step_kernels)
    assert on_cpu == ["append_heads"] * 3 * layers
    assert torch.equal(fused[0], own[0])
    assert fused[1] == own[1] == 8


class Subclass(torch.Tensor):
    """Of a tensor: what DTensors are."""


def unlike(layer, named, how):
    """A layer of which one thing is not what a step in one kernel needs."""
    if how == "training":
        layer.train()
    elif how == "hook":
        layer.q_norm.register_forward_hook(lambda *given: None)
    elif how == "norm":
        layer.k_norm.weight.data = layer.k_norm.weight.data.float()
    elif how == "eps":
        layer.k_norm.variance_epsilon = 1e-3
    elif how == "weight":
        layer.q_norm._parameters["weight"] = layer.q_norm.weight.data.as_subclass(Subclass)
    elif how == "other norm":
        layer.q_norm = torch.nn.LayerNorm(16)
    elif how == "attention":
        layer.config._attn_implementation = "eager"
    elif how == "angles":
        named["position_embeddings"] = tuple(x.float() for x in named["position_embeddings"])
    elif how == "cache":
        named[cache_name()] = cache_in(named).layers[0]
    elif how == "offloaded":
        cache_in(named).offloading = True
    elif how == "class":
        cache_in(named).layers[0].__class__ = type("Other", (StaticLayer,), {})


HOWS = ["training", "weight", "hook", "norm", "eps", "attention", "angles", "cache", "offloaded", "class"]


@pytest.mark.parametrize("how", ["", "gradients", "other norm", *HOWS])
def test_layers_that_run_by_their_own_forward(how, on_cpu):
    model = quantized_norms("qwen3")
    layer, cache = model.model.layers[0].self_attn, StaticCache(config=model.config, max_cache_len=8)
    x, angles = torch.randn(2, 1, 48).bfloat16(), torch.randn(2, 2, 1, 16).bfloat16()
    with shared_heads(), torch.set_grad_enabled(how == "gradients"):
        named = {cache_name(): cache, "position_embeddings": tuple(angles), "attention_mask": None}
        own = type(layer).forward
        assert attention_heads._form(layer, own, x, named) is None  # the first tokens allocate
        cache.early_initialization(2, 1, 16, torch.bfloat16, torch.device("cpu"))
        unlike(layer, named, how)
        assert attention_heads._form(layer, own, x, named) == (None if how else (False, True))


class Doubled(LlamaAttention):
    """Whose queries are twice as long."""

    def forward(self, hidden_states, **named):
        return super().forward(hidden_states=2 * hidden_states, **named)


def test_classes_that_do_something_else_keep_their_forward(on_cpu):
    model = quantized_norms("llama")
    for layer in model.model.layers:
        layer.self_attn.__class__ = Doubled
    own = steps(model, heads_alone)
    fused = steps(model, step_kernels)
    assert torch.equal(fused[0], own[0])


@pytest.mark.parametrize("clip", [None, 0.5, 8.0])
def test_olmo_clips_in_place(clip, on_cpu):
    sizes = {"vocab_size": 72, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    config = OlmoConfig(**sizes, num_attention_heads=4, clip_qkv=clip, pad_token_id=0)
    model = OlmoForCausalLM(config).eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 100
    own, _ = steps(model, heads_alone), steps(model, step_kernels)  # which tries what the class does
    on_cpu.clear()
    fused = steps(model, step_kernels)
    assert torch.equal(fused[0], own[0])
    assert ("append_heads" in on_cpu) == (clip is None)


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("how", [None, NORM, (1e-5, True, False)])
@pytest.mark.parametrize(
    ("sizes", "columns"),
    [
        ((1, 1, 32, 4), (128, 128)),
        ((32, 1, 16, 2), (256, 64)),
        ((2, 7, 5, 1), (64, 64)),
        ((3, 2, 2, 1), (12, 4)),  # in 16 bits no whole pieces: PyTorch's
    ],
)
def test_the_kernel_gives_the_definition(sizes, columns, how, dtype):
    for length in (0, 3, 8, 9, 20):
        tensors = operands(sizes, *columns, dtype, "cuda", how is not None, length)
        require_defined(tensors, how or NORM)
    have = results(tensors, how or NORM)
    for _ in range(200):
        assert all(map(torch.equal, results(tensors, how or NORM), have))


@gpu
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_layers_of_transformers_on_a_gpu(name, monkeypatch):
    model = quantized_norms(name).cuda()
    calls, own = [], ops.append_heads
    monkeypatch.setattr(ops, "append_heads", lambda *given: calls.append(1) or own(*given))
    monkeypatch.setattr(attention_heads, "_form", lambda *given: None)
    want = steps(model, step_kernels)
    assert not calls
    monkeypatch.undo()
    monkeypatch.setattr(ops, "append_heads", lambda *given: calls.append(1) or own(*given))
    have = steps(model, step_kernels)
    assert len(calls) >= 3
    assert torch.equal(have[0], want[0])
    assert have[1] == want[1]
