"""Rotary embeddings in one kernel: the op, and the functions of models that it stands in for."""

from __future__ import annotations

import functools
import gc
import importlib
import itertools
import weakref

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers.models.llama.modeling_llama import LlamaAttention

import kbit
from kbit.nn import merged, rotary
from tiny_models import build

ops = torch.ops.kbit
gpu = pytest.mark.gpu
WHOLE, PARTLY = {32}, {32, 16}  # columns of 32 that a function may turn


def operands(batch, heads, tokens, columns, turned, dtype=torch.float32, device="cpu", angles=None):
    """Query and key as models have them, with heads behind tokens, then cos and sin."""
    query, key = (torch.randn(batch, tokens, of, columns).to(device, dtype).transpose(1, 2) for of in heads)
    cos, sin = torch.randn(2, angles or batch, tokens, turned).to(device, dtype)
    return query, key, cos, sin


def defined(x, cos, sin, interleaved=False):
    """In transformers' words, in the dtype of x."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = cos.shape[-1] // 2
    if interleaved:
        turned = turned.unflatten(-1, (half, 2)).transpose(-1, -2).flatten(-2)
        cos, sin = (torch.cat((angles[..., :half],) * 2, -1) for angles in (cos, sin))
    rotated = torch.cat((-turned[..., half:], turned[..., :half]), -1)
    return torch.cat(((turned * cos.unsqueeze(1)) + (rotated * sin.unsqueeze(1)), rest), -1)


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(1, 4, 2, 1), (2, 3, 1, 5), (3, 1, 0, 2), (0, 2, 2, 2)]),
    st.sampled_from([(8, 8), (8, 2), (6, 6), (16, 6)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.booleans(),
    st.booleans(),
)
def test_the_definition(shape, columns, dtype, one_angle, interleaved):
    batch, *heads, tokens = shape
    given = operands(batch, heads, tokens, *columns, dtype, angles=1 if one_angle else None)
    for x, y in zip(given[:2], ops.rotary(*given, interleaved), strict=True):
        assert torch.equal(y, defined(x, *given[2:], interleaved))


ARGUMENTS = dict(zip(("query", "key", "cos", "sin"), operands(2, (4, 2), 3, 8, 8), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": ARGUMENTS["query"].int()}, "rotary: query must be"),
        ({"cos": ARGUMENTS["cos"].half()}, "rotary: cos must be torch.float32 like query, got torch.float16"),
        ({"key": ARGUMENTS["key"].to("meta")}, "rotary: key is on meta, query on cpu"),
        ({"key": ARGUMENTS["key"][:, :, :2]}, r"query must be \[B, H, T, D\] and key \[B, H', T, D\]"),
        ({"query": ARGUMENTS["query"][0]}, r"query must be \[B, H, T, D\]"),
        ({"cos": torch.zeros(2, 3, 6)}, r"cos and sin must be \[2 or 1, 3, R\]"),
        ({"cos": torch.zeros(3, 3, 8), "sin": torch.zeros(3, 3, 8)}, r"\[2 or 1, 3, R\]"),
        ({"cos": torch.zeros(2, 3, 10), "sin": torch.zeros(2, 3, 10)}, "an even R up to 8"),
        ({"cos": torch.zeros(2, 3, 3), "sin": torch.zeros(2, 3, 3)}, "an even R up to 8"),
    ],
)
def test_bad_arguments_are_refused(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        ops.rotary(*(ARGUMENTS | change).values())


def test_opcheck():
    torch.library.opcheck(ops.rotary.default, tuple(ARGUMENTS.values()))


# -- functions of models -------------------------------------------------------------------------------------


def own_of(family):
    return importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb


@pytest.mark.parametrize(
    ("family", "turned"),
    [
        ("llama", WHOLE),
        ("qwen3_moe", WHOLE),
        ("glm4_moe_lite", WHOLE),
        ("qwen3_next", PARTLY),
        ("glm4_moe", PARTLY),
        ("cohere", set()),  # pairs neighbouring columns
        ("glm4", set()),
    ],
)
def test_families_are_known(family, turned):
    own = own_of(family)
    assert {columns for columns in PARTLY if rotary._is_rotary(own, columns)} == turned
    assert (rotary._fused(own) is own) == (not turned)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "deepseek_v3"])
def test_families_that_interleave_are_known(family):
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    own = module.apply_rotary_pos_emb_interleave
    assert {columns for columns in PARTLY if rotary._is_rotary(own, columns, True)} == WHOLE
    assert rotary._MAKERS[rotary.INTERLEAVING](own) is not own
    assert rotary._fused(own) is own


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite"])
def test_models_give_the_same_logits(architecture, monkeypatch):
    model, ids = build(architecture, torch.bfloat16), torch.tensor([[3, 5, 7]])
    module = importlib.import_module(type(model).__module__)
    own, calls = module.apply_rotary_pos_emb, []
    monkeypatch.setattr(rotary, "_takes", lambda *tensors: calls.append(tensors) or True)
    with torch.no_grad():
        want = model(ids).logits
        with rotary.fused_rotary(rotary.rotary_modules(model)):
            assert torch.equal(model(ids).logits, want)
    assert calls
    assert module.apply_rotary_pos_emb is own
    with pytest.raises(RuntimeError, match="stop"), rotary.fused_rotary(rotary.rotary_modules(model)):
        raise RuntimeError("stop")
    assert module.apply_rotary_pos_emb is own


def test_which_classes_turn_heads():
    from transformers.models.cohere import modeling_cohere
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3_next import modeling_qwen3_next

    assert rotary.modules_of(modeling_llama.LlamaAttention.forward) == [modeling_llama]
    assert rotary.modules_of(modeling_qwen3_next.Qwen3NextAttention.forward) == [modeling_qwen3_next]
    assert rotary.modules_of(modeling_qwen3_next.Qwen3NextGatedDeltaNet.forward) == []
    assert rotary.modules_of(modeling_cohere.CohereAttention.forward) == []  # its function is not known


def test_what_stands_in_for_a_forward_is_not_kept():
    own = LlamaAttention.forward
    found = rotary.modules_of(own)
    assert found
    known = rotary._modules_of.cache_info().currsize
    assert rotary.modules_of(functools.wraps(own)(lambda *given: own(*given))) == found
    assert rotary._modules_of.cache_info().currsize == known


def test_contexts_that_overlap():
    # Not Llama's, for which a server that an earlier test ran in this process may have something stand in.
    module = importlib.import_module("transformers.models.mistral.modeling_mistral")
    own, contexts = module.apply_rotary_pos_emb, [rotary.fused_rotary([module]) for _ in range(3)]
    for context in contexts:
        context.__enter__()
    fused = module.apply_rotary_pos_emb
    assert fused is rotary._fused(own) is not own
    for context in contexts:  # the first is left first, as another thread might
        assert module.apply_rotary_pos_emb is fused
        context.__exit__(None, None, None)
    assert module.apply_rotary_pos_emb is own


def test_a_model_is_not_kept_alive():
    model = build("llama", torch.bfloat16)
    modules, gone = rotary.rotary_modules(model), weakref.ref(model)
    assert [module.__name__ for module in modules] == ["transformers.models.llama.modeling_llama"]
    with rotary.fused_rotary(modules):
        del model
        gc.collect()
        assert gone() is None


def test_shapes_that_belong_together():
    query, key, cos, sin = operands(2, (4, 2), 3, 32, 16)
    assert rotary._belong(query, key, cos, sin)
    assert rotary._belong(query, key, cos[:1], sin[:1])
    assert not rotary._belong(query, key[:, :, :1], cos, sin)
    assert not rotary._belong(query, key, cos[:, :1], sin[:, :1])
    assert not rotary._belong(query[..., :8], key[..., :8], cos, sin)


def test_what_the_kernel_is_not_for_is_left_to_the_model(monkeypatch):
    monkeypatch.setattr(ops, "rotary", None)
    own = own_of("llama")
    fused, given = rotary._fused.__wrapped__, operands(1, (4, 2), 3, 32, 32)
    monkeypatch.setattr(rotary, "_is_rotary", lambda *given: True)
    for one, other in zip(fused(own)(*given), own(*given), strict=True):  # on a CPU
        assert torch.equal(one, other)


# Not Llama's function, for which a server may have something stand in (see above).
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "qwen3_next", "glm4_moe_lite"])
def test_attention_of_quantized_models_uses_it(architecture, monkeypatch):
    """Without being asked to, in prompts and steps; not on a CPU, nor where torch.compile traces."""
    model, ids = build(architecture, torch.bfloat16), torch.tensor([[3, 5, 7]])
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))
    layers = [module for module in model.modules() if hasattr(module, "o_proj")]
    calls, op = [], ops.rotary
    monkeypatch.setattr(rotary, "_takes", lambda *given: True)
    for module in {type(layer).own for layer in layers}:  # tried by now
        for python_module in rotary.modules_of(module.forward):
            with rotary.fused_rotary([python_module]):
                pass
    monkeypatch.setattr(ops, "rotary", lambda *given: calls.append(given) or op(*given))
    with torch.no_grad():
        want = model(ids).logits
        assert not calls
        monkeypatch.setattr(merged, "_is_on_gpu", lambda module: True)
        assert torch.equal(model(ids).logits, want)
        assert len(calls) == len(layers) > 0
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        model(ids)
    assert len(calls) == len(layers)


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "columns", "turned"),
    [
        (1, (32, 4), 1, 128, 128),
        (32, (32, 8), 1, 128, 128),
        (2, (16, 2), 7, 256, 64),
        (3, (5, 1), 300, 64, 64),
        (1, (40, 40), 2048, 80, 80),
        (2, (3, 2), 5, 72, 24),  # no whole pieces: PyTorch's
    ],
)
def test_the_kernel_gives_the_definition(batch, heads, tokens, columns, turned, dtype):
    for angles, interleaved in itertools.product((None, 1), (False, True)):
        given = operands(batch, heads, tokens, columns, turned, dtype, "cuda", angles)
        for x, y in zip(given[:2], ops.rotary(*given, interleaved), strict=True):
            assert torch.equal(y, defined(x, *given[2:], interleaved))


@gpu
def test_steps_of_a_model_use_it(monkeypatch):
    model, ids = build("qwen3_moe", torch.bfloat16).cuda(), torch.tensor([[3, 5, 7]], device="cuda")
    calls, op = [], ops.rotary
    rotary._fused(own_of("qwen3_moe"))  # tried by now
    monkeypatch.setattr(ops, "rotary", lambda *given: calls.append(given) or op(*given))
    with torch.no_grad():
        want = model(ids).logits
        with rotary.fused_rotary(rotary.rotary_modules(model)):
            assert torch.equal(model(ids).logits, want)
    assert len(calls) == model.config.num_hidden_layers


@gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen3_next", "glm4_moe_lite"])
def test_prompts_of_quantized_models_use_it(architecture, monkeypatch):
    model, ids = build(architecture, torch.bfloat16).cuda(), torch.tensor([[3, 5, 7]], device="cuda")
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))
    calls, op = [], ops.rotary
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(rotary, "_takes", lambda *given: False)
        want = model(ids).logits
        patch.undo()
        patch.setattr(ops, "rotary", lambda *given: calls.append(given) or op(*given))
        assert torch.equal(model(ids).logits, want)
    assert len(calls) == sum(hasattr(module, "o_proj") for module in model.modules())
