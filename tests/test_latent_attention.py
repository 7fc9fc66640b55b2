"""`kbit::latent_attention_step`: the op against attention with expanded keys and values, and its kernels."""

from __future__ import annotations

import functools
import math
import threading

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    StaticCache,
)
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteAttention

import kbit
import static_steps
from graph_tape import Recorder, compile_on_cpu, enable_on_cpu
from kbit.backends.cuda import latent as kernels
from kbit.backends.cuda.driver import DeviceLimits
from kbit.integrations.transformers import cuda_graphs, latent_attention
from kbit.integrations.transformers.attention import shared_heads
from kbit.integrations.transformers.cache_argument import cache_name, with_cache
from kbit.integrations.transformers.latent_prompts import fused_latent_prompts
from kbit.integrations.transformers.step_kernels import step_kernels
from kbit.nn import KbitLinear
from kbit.nn.norm import fuse_norms
from latent_steps import HOW, ROOM, operands, require, turned
from static_steps import heads_alone, take_caches_of_a_cpu
from tiny_models import ARCHITECTURES

ops = torch.ops.kbit
gpu = pytest.mark.gpu


def step(tensors, how=HOW):
    """The op's result, with caches of its own, and these."""
    tensors = tensors | {name: tensors[name].clone() for name in ("latents", "keys")}
    return ops.latent_attention_step(*tensors.values(), *how), tensors["latents"], tensors["keys"]


def require_attention(tensors, how=HOW):
    require(*step(tensors, how), tensors, how)


# -- the op --------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([(8, 4), (33, 2), (64, 16)]),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.integers(0, ROOM + 3),
    st.booleans(),
    st.sampled_from([HOW, (0.3, 1e-5, True, False, False)]),
)
def test_it_is_attention(batch, heads, sizes, dtype, length, mask, how):
    torch.manual_seed(batch * 100 + length)
    require_attention(operands(batch, heads, *sizes, dtype, length=length, mask=mask), how)


def test_it_is_attention_with_expanded_keys_and_values():
    """What transformers computes: keys and values of all heads, expanded from latents by one weight."""
    batch, heads, columns, rotary, own, of_values = 2, 3, 16, 4, 6, 5
    tensors = operands(batch, heads, columns, rotary, length=7)
    weight = torch.randn(heads, own + of_values, columns)
    query = torch.randn(batch, heads, own)
    tensors["absorbed"] = (query.transpose(0, 1) @ weight[:, :own]).transpose(0, 1)
    y, latents, keys = step(tensors)
    expanded = torch.einsum("hvc,blc->bhlv", weight, latents[:, :8])
    turned_keys = keys[:, None, :8].expand(-1, heads, -1, -1)
    q = turned(tensors["query"], tensors["cos"][:, None], tensors["sin"][:, None], True)
    want = torch.nn.functional.scaled_dot_product_attention(
        torch.cat((query, q), -1)[:, :, None],
        torch.cat((expanded[..., :own], turned_keys), -1),
        expanded[..., own:],
        attn_mask=tensors["mask"][:, None, None, :8],
        scale=HOW[0],
    )[:, :, 0]
    have = torch.einsum("bhc,hvc->bhv", y, weight[:, own:])
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_nothing_but_masked_tokens_gives_zero():
    tensors = operands(1, 2, 8, 4)
    tensors["mask"] = torch.full((1, ROOM), -math.inf)
    assert not step(tensors)[0].any()


GIVEN = operands(2, 3, 8, 4)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"query": GIVEN["query"].long()}, TypeError, "query"),
        ({"query": GIVEN["query"][..., :2]}, ValueError, r"query must be \[2, 3, 4\]"),
        ({"absorbed": GIVEN["absorbed"][0]}, ValueError, "3, 3 and 2 dimensions"),
        ({"latent": GIVEN["latent"][:, :8]}, ValueError, r"latent must be \[2, 12\]"),
        ({"norm": GIVEN["norm"].half()}, TypeError, "norm must be torch.float32"),
        ({"cos": GIVEN["cos"][:, :3]}, ValueError, "even number of columns"),
        ({"sin": GIVEN["sin"].to("meta")}, ValueError, "sin is on meta"),
        ({"mask": GIVEN["mask"].bool()}, TypeError, "mask must be torch.float32"),
        ({"mask": GIVEN["mask"][:, :5]}, ValueError, r"mask must be \[2, 70\]"),
        ({"keys": GIVEN["keys"][:, :5]}, ValueError, r"keys must be \[2, 70, 4\]"),
        ({"latents": GIVEN["latents"].mT.contiguous().mT}, ValueError, "must be contiguous"),
        ({"length": torch.zeros(2).long()}, TypeError, "length must be one int64"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else None,
)
def test_what_does_not_belong_together_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        ops.latent_attention_step(*(GIVEN | change).values(), *HOW)


def test_opcheck():
    tensors = operands(2, 3, 8, 4, length=ROOM)  # no NaN, which opcheck takes for unequal
    torch.library.opcheck(ops.latent_attention_step.default, (*tensors.values(), *HOW))


H200, A100 = DeviceLimits(132, 232448, "90a"), DeviceLimits(108, 166912, "80")


@pytest.mark.parametrize(
    ("sizes", "device", "plan"),
    [
        ((1, 20, 192), H200, (20, 1, 6)),
        ((1, 20, 32768), H200, (20, 1, 128)),
        ((32, 20, 4096), H200, (20, 1, 8)),  # two blocks on a multiprocessor
        ((32, 20, 4096), A100, (20, 1, 3)),
        ((1, 128, 8192), H200, (32, 4, 33)),
        ((300, 3, 10), A100, (16, 1, 1)),
    ],
)
def test_plans(sizes, device, plan):
    batch, heads, room = sizes
    found = kernels.plan(batch, heads, (512, 64), room, device)
    assert (found.sizes.heads, *found[1:]) == plan


# -- layers of transformers ----------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    """Caches on a CPU count as those of a GPU, and latents of any size as the kernels'; steps so run."""
    calls = []
    take_caches_of_a_cpu(monkeypatch)
    monkeypatch.setattr(latent_attention, "takes", lambda latent, turned: True)
    own = latent_attention.attend
    monkeypatch.setattr(latent_attention, "attend", lambda *given: calls.append(1) or own(*given))
    return calls


def model_of(dtype=torch.float32, bits=None, **more):
    """A tiny GLM-4.7-Flash with two layers."""
    config = ARCHITECTURES["glm4_moe_lite"]()
    for name, value in more.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().to(dtype)
    if bits is None:
        fuse_norms(model)
        return model
    return kbit.quantize_model(model, kbit.QuantizationPolicy(bits=bits))


steps = functools.partial(static_steps.steps, padding=2)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("interleaved", [True, False])
def test_layers_of_transformers_compute_the_same(bits, interleaved, on_cpu):
    model = model_of(bits=bits)
    model.config.rope_interleave = interleaved
    own = steps(model, heads_alone)
    assert not on_cpu
    steps(model, step_kernels)  # tries what the class does
    forms = [latent_attention._forms[layer.self_attn] for layer in model.model.layers]
    assert [*forms[0].values()] == [*forms[1].values()] == [interleaved]
    on_cpu.clear()
    fused = steps(model, step_kernels)
    assert len(on_cpu) == 3 * 2
    torch.testing.assert_close(fused[0], own[0], rtol=1e-4, atol=1e-4)
    assert fused[1] == own[1] == 8


def test_a_prompt_in_another_thread_leaves_steps_their_kernel(on_cpu):
    model, inside, leave = model_of(bits=4), threading.Event(), threading.Event()

    def prompt():
        with fused_latent_prompts(model):
            inside.set()
            leave.wait()

    other = threading.Thread(target=prompt)
    other.start()
    inside.wait()
    try:
        steps(model, step_kernels)
    finally:
        leave.set()
        other.join()
    assert len(on_cpu) >= 3 * 2


def test_deepseek_attends_so(on_cpu):
    sizes = {"vocab_size": 72, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 24, "kv_lora_rank": 16}
    sizes |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 2}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, pad_token_id=0)).eval()
    fuse_norms(model)
    own = steps(model, heads_alone)
    steps(model, step_kernels)
    on_cpu.clear()
    torch.testing.assert_close(steps(model, step_kernels)[0], own[0], rtol=1e-4, atol=1e-4)
    assert len(on_cpu) == 3 * 2


def test_queries_without_a_latent_of_their_own(on_cpu):
    model = model_of(q_lora_rank=None)
    own = steps(model, heads_alone)
    steps(model, step_kernels)
    assert on_cpu
    torch.testing.assert_close(steps(model, step_kernels)[0], own[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inference", [False, True])
def test_a_weight_is_decoded_anew_when_its_codes_change(inference, on_cpu):
    model = model_of(bits=4)
    with torch.inference_mode(inference):
        steps(model, step_kernels)
    layers = [layer.self_attn.kv_b_proj for layer in model.model.layers]
    before = [latent_attention._decoded[layer][1] for layer in layers]
    with torch.no_grad():
        for layer in layers:
            layer.weight_packed.bitwise_not_()
    own = steps(model, heads_alone)
    on_cpu.clear()
    torch.testing.assert_close(steps(model, step_kernels)[0], own[0], rtol=1e-4, atol=1e-4)
    assert on_cpu
    after = [latent_attention._decoded[layer][1] for layer in layers]
    assert all(old is new for old, new in zip(before, after, strict=True))  # recorded steps read them
    kbit.disable_cuda_graphs(model)
    assert not {*latent_attention._decoded} & {*layers}


def test_recorded_steps_attend_to_latents(on_cpu):
    model = model_of(bits=4)
    ids = torch.arange(2, 12).view(2, 5)
    named = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    want = model.generate(ids, **named)
    assert not on_cpu
    recorder = Recorder()
    made = cuda_graphs.Steps(model, False, recorder, Recorder())
    model.get_compiled_call = lambda config=None: made
    compile_on_cpu(model)
    have = model.generate(ids, cache_implementation="static", **named)
    assert torch.equal(have, want)
    assert (recorder.recorded, recorder.replayed) == (1, 8 - cuda_graphs.WARM_STEPS)
    assert len(on_cpu) >= 2 * cuda_graphs.WARM_STEPS


class Doubled(Glm4MoeLiteAttention):
    """Whose values are twice as large."""

    def expand_kv(self, kv_nope, k_rot):
        keys, values = super().expand_kv(kv_nope, k_rot)
        return keys, 2 * values


def test_classes_that_do_something_else_keep_their_forward(on_cpu):
    model = model_of()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Doubled
    own, fused = steps(model, heads_alone), steps(model, step_kernels)
    assert torch.equal(fused[0], own[0])


def test_recorded_steps_see_weights_that_are_loaded(on_cpu):
    model, other = (model_of(bits=4) for _ in range(2))
    with torch.no_grad():
        for layer, another in zip(model.model.layers, other.model.layers, strict=True):
            another.self_attn.kv_b_proj = KbitLinear.from_linear(
                torch.nn.Linear(16, layer.self_attn.kv_b_proj.out_features, bias=False), 4
            )
    ids = torch.arange(2, 12).view(2, 5)
    named = {"max_new_tokens": 9, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}

    def logits(of, **more):
        return torch.stack(of.generate(ids, **named, **more).logits)

    want = logits(model), logits(other)
    recorder = enable_on_cpu(model)
    cache = StaticCache(config=model.config, max_cache_len=16)
    for expected in want:
        for _ in range(2):
            cache.reset()
            have = logits(model, **with_cache(cache))
            torch.testing.assert_close(have, expected, rtol=1e-3, atol=1e-4)
        model.load_state_dict(other.state_dict())  # in place
    assert recorder.recorded == 1


def test_a_class_whose_forward_is_replaced_is_tried_again(on_cpu, monkeypatch):
    model = model_of()
    steps(model, step_kernels)
    own = Glm4MoeLiteAttention.forward
    monkeypatch.setattr(
        Glm4MoeLiteAttention, "forward", lambda self, *given, **named: twice(own, self, *given, **named)
    )
    want = steps(model, heads_alone)
    on_cpu.clear()
    assert torch.equal(steps(model, step_kernels)[0], want[0])


def twice(own, *given, **named):
    y, weights = own(*given, **named)
    return 2 * y, weights


def unlike(layer, named, how):
    """A layer of which one thing is not what a step of latents needs."""
    if how == "hook":
        layer.kv_b_proj.register_forward_hook(lambda *given: None)
    elif how == "bias":
        layer.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(layer.kv_b_proj.out_features))
    elif how == "subclass":
        layer.kv_b_proj.__class__ = type("Other", (torch.nn.Linear,), {})
    elif how == "dtype":
        layer.kv_b_proj.weight.data = layer.kv_b_proj.weight.data.half()
    elif how == "norm":
        layer.kv_a_layernorm = torch.nn.Identity()
    elif how == "attentions":
        named["output_attentions"] = True
    elif how == "position bias":
        named["position_bias"] = torch.zeros(2, 2, 1, 8)
    elif how == "boolean mask":
        named["attention_mask"] = torch.ones(2, 1, 1, 8, dtype=torch.bool)
    elif how == "mask of heads":
        named["attention_mask"] = torch.zeros(2, 2, 1, 8)


HOWS = ["hook", "bias", "subclass", "dtype", "norm", "attentions", "position bias", "boolean mask"]
HOWS += ["mask of heads", "tokens"]


@pytest.mark.parametrize("how", ["", "gradients", *HOWS])
def test_layers_that_run_by_their_own_forward(how, on_cpu):
    model = model_of()
    layer, cache = model.model.layers[0].self_attn, StaticCache(config=model.config, max_cache_len=8)
    tokens = 2 if how == "tokens" else 1
    x, angles = torch.randn(2, tokens, 48), torch.randn(2, 2, tokens, 8)
    cache.layers[0].lazy_initialization(torch.empty(2, 1, 0, 16), torch.empty(2, 1, 0, 8))
    with shared_heads(), torch.set_grad_enabled(how == "gradients"):
        named = {cache_name(): cache, "position_embeddings": tuple(angles), "attention_mask": None}
        unlike(layer, named, how)
        form = latent_attention._form(layer, type(layer).forward, x, named)
        weight = latent_attention._weight(layer.kv_b_proj, x)
        assert (form is None or weight is None) == bool(how)


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "room", "lengths"),
    [
        (1, 20, ROOM, (0, 1, 31, 32, 33, 63, 64, 69, 70, 73)),
        (3, 5, ROOM, (5, 40)),
        (2, 16, 1, (0, 1)),
        (1, 40, ROOM, (17,)),
        (1, 128, 300, (299,)),
        (33, 20, 200, (150,)),
        (1, 20, 8192, (3000, 8191)),
    ],
)
def test_the_kernels_compute_attention(batch, heads, room, lengths, dtype):
    torch.manual_seed(heads)
    for length in lengths:
        for mask in (True, False):
            tensors = operands(batch, heads, 512, 64, dtype, "cuda", length, mask, room)
            require_attention(tensors, (0.07, *HOW[1:]))
            require_attention(tensors, (0.07, 1e-5, True, False, False))
    have = step(tensors)
    for _ in range(200):
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(step(tensors), have, strict=True)
        )


@gpu
@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_layers_of_transformers_on_a_gpu(batch, bits, monkeypatch):
    more = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 64}
    model = model_of(torch.bfloat16, bits, **more).cuda()
    calls, own = [], latent_attention.attend
    monkeypatch.setattr(latent_attention, "attend", lambda *given: calls.append(1) or own(*given))
    want = steps(model, heads_alone, batch)
    assert not calls
    have = steps(model, step_kernels, batch)
    assert len(calls) >= 3 * 2
    assert have[1] == want[1]
    torch.testing.assert_close(have[0], want[0], rtol=0.05, atol=0.05)


@gpu
def test_recorded_steps_give_the_same_tokens(monkeypatch):
    more = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 64}
    model = model_of(torch.bfloat16, 4, **more).cuda()
    calls, own = [], latent_attention.attend
    monkeypatch.setattr(latent_attention, "attend", lambda *given: calls.append(1) or own(*given))

    def generate(record):
        monkeypatch.setattr(cuda_graphs.Steps.__init__, "__defaults__", (False, record, None))
        kbit.enable_cuda_graphs(model)
        ids = torch.arange(2, 12, device="cuda").view(2, 5)
        named = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
        calls.clear()
        return model.generate(ids, **named), len(calls)

    def refuse(run, device):
        raise RuntimeError("not recorded")

    with pytest.warns(cuda_graphs.CUDAGraphWarning, match="not recorded"):
        want, eager_calls = generate(refuse)
    have, recorded_calls = generate(cuda_graphs.record_cuda_graph)
    assert torch.equal(have, want)
    assert eager_calls > recorded_calls > 0
