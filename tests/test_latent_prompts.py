"""Layers of latent attention run whole prompts by `kbit::latent_heads`, as their own forward runs them."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

import kbit
from kbit.integrations.transformers import latent_prompts
from kbit.integrations.transformers.cache_argument import with_cache
from kbit.integrations.transformers.prompts import prompt_kernels
from kbit.integrations.transformers.static_caches import fused_updates
from tiny_models import build

SIZES = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 24, "kv_lora_rank": 40}


@pytest.fixture
def calls(monkeypatch):
    """Calls of the op, on a CPU, too."""
    found, op = [], torch.ops.kbit.latent_heads
    monkeypatch.setattr(torch.ops.kbit, "latent_heads", lambda *given: found.append(given) or op(*given))
    monkeypatch.setattr(latent_prompts, "is_on_gpu", lambda x: True)
    return found


def deepseek(**more):
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "vocab_size": 72}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "first_k_dense_replace": 2}
    config = DeepseekV3Config(**sizes, **heads, **{**SIZES, "q_lora_rank": 24} | more)
    return DeepseekV3ForCausalLM(config).to(torch.bfloat16).eval()


def read(model, ids):
    """Logits of a prompt, and what its cache holds then."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        logits = model(ids, **with_cache(cache)).logits
    return logits, [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]


def compare(model, device="cpu"):
    """A model's own results and those by the op, bit for bit."""
    ids = torch.randint(1, 30, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    own, held = read(model, ids)
    with prompt_kernels(model) as causal:
        found, its = read(model, ids)
        assert causal() == model.config.num_hidden_layers
    assert torch.equal(found, own)
    assert all(map(torch.equal, its, held))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rank", [None, 24])
def test_layers_of_deepseek(rank, interleaved, calls):
    model = deepseek(q_lora_rank=rank, rope_interleave=interleaved)
    compare(model)
    tried = 2 * (1 if interleaved else 2)
    assert len(calls) == 2 + tried
    assert all(given[-1] == interleaved for given in calls[-1:])
    kbit.quantize_model(model, kbit.QuantizationPolicy(search=False))
    compare(model)
    assert len(calls) == 4 + tried


def test_layers_of_glm(calls, monkeypatch):
    monkeypatch.setattr(latent_prompts, "takes", lambda *columns: True)  # the model's are fewer
    compare(build("glm4_moe_lite", torch.bfloat16, spread=False).eval())
    assert calls


def test_without_a_cache(calls):
    model = deepseek()
    ids = torch.tensor([[3, 5, 7, 2]])
    with torch.no_grad():
        own = model(ids, use_cache=False).logits
        with prompt_kernels(model):
            assert torch.equal(model(ids, use_cache=False).logits, own)
    assert calls


def unlike(model, how):
    """A model of which one thing is not as the op needs it."""
    attention = model.model.layers[1].self_attn
    if how == "hook":
        attention.q_b_proj.register_forward_hook(lambda *given: None)
    elif how == "class":
        own = type(attention)
        forward = lambda self, *given, **named: (own.forward(self, *given, **named)[0] * 2, None)  # noqa: E731
        attention.__class__ = type("Other", (own,), {"forward": forward})
    elif how == "columns":
        attention.qk_nope_head_dim, attention.v_head_dim = 24, 32
    elif how == "training":
        attention.train()
    return model


@pytest.mark.parametrize("how", ["hook", "class", "columns", "training"])
def test_layers_that_run_by_their_own_forward(how, calls):
    model = unlike(deepseek(), how)
    if how == "columns":  # other sizes of the same product
        model.model.layers[1].self_attn.q_b_proj = torch.nn.Linear(24, 2 * 88, bias=False).bfloat16()
        model.model.layers[1].self_attn.qk_head_dim = 88
        model.model.layers[1].self_attn.o_proj = torch.nn.Linear(64, 48, bias=False).bfloat16()
    compare(model)
    in_model = [given for given in calls if given[0].shape[1] == 9]
    assert len(in_model) == (2 if how == "class" else 1)  # which calls its base's forward, as that is


def test_what_is_no_whole_prompt_is_left_alone(calls):
    model = deepseek()
    ids = torch.tensor([[3, 5, 7, 2]])
    with prompt_kernels(model):
        model(ids)  # with gradients
        with torch.no_grad():
            model(ids[:, :1])
            model(ids, attention_mask=torch.zeros(1, 1, 4, 4, dtype=torch.bfloat16))
    with torch.no_grad(), fused_updates(), latent_prompts.fused_latent_prompts(model):
        model(ids)  # attention has not been told
    assert not calls


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_on_a_gpu(interleaved, dtype, calls):
    sizes = {"qk_nope_head_dim": 192, "v_head_dim": 256, "kv_lora_rank": 512, "rope_interleave": interleaved}
    model = deepseek(**sizes).to("cuda", dtype)
    compare(model, "cuda")
    assert calls
