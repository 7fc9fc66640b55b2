"""Residual connections: sums that are made by the norm behind them, and models whose layers do that."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from torch import nn

import kbit
from kbit.nn import norm, residuals
from kbit.nn.residuals import FusedResiduals
from kbit.ops import direct
from tiny_models import build

gpu = pytest.mark.gpu
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "glm4_moe_lite", "mixtral")


@pytest.fixture
def kernels(monkeypatch):
    """The op on a CPU, where a norm otherwise goes by its own forward; how often it ran."""
    runs = []
    run = direct.add_rms_norm
    monkeypatch.setattr(direct, "has_rms_norm", lambda x: True)
    monkeypatch.setattr(direct, "add_rms_norm", lambda *given: runs.append(1) or run(*given))
    return runs


def quantized(family, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = build(family, dtype).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(weight, 0.5, 0.2)
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))
    return model


def layers_of(model):
    return [module for module in model.modules() if isinstance(module, FusedResiduals)]


def without(model):
    """A copy that makes its sums itself."""
    plain = copy.deepcopy(model)
    for layer in layers_of(plain):
        layer.__class__ = layer.own
    assert not layers_of(plain)
    return plain


def one_norm(columns=32):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    made = LlamaRMSNorm(columns).bfloat16()
    nn.init.normal_(made.weight)
    norm.fuse_norms(nn.ModuleList([made]))
    return made


def test_lists_of_layers_may_be_of_any_class():
    """Slicing one would make another of its class, which may want other arguments."""

    class Layers(nn.ModuleList):
        def __init__(self, count, columns):
            super().__init__(nn.Linear(columns, columns) for _ in range(count))

    norm_of_weights = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    model = nn.Sequential(norm_of_weights, Layers(3, 32))
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))
    assert all(isinstance(layer, kbit.nn.KbitLinear) for layer in model[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_models_give_the_same(family, kernels):
    model = quantized(family)
    assert len(layers_of(model)) == model.config.num_hidden_layers
    sums = 2 * model.config.num_hidden_layers
    with torch.no_grad():
        want = without(model)(IDS, output_hidden_states=True)
        assert not kernels
        assert torch.equal(model(IDS).logits, want.logits)
        assert len(kernels) == sums
        have = model(IDS, output_hidden_states=True)  # by hooks on layers, whose own last sums these then are
    assert len(kernels) == sums + sums // 2
    assert torch.equal(have.logits, want.logits)
    assert all(map(torch.equal, have.hidden_states, want.hidden_states))
    assert not any(norm._NORMED in vars(module) for module in model.modules())


def test_what_is_decoded_is_the_same(kernels):
    model, settings = quantized("qwen3_next"), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    want = without(model).generate(IDS, **settings)
    assert torch.equal(model.generate(IDS, **settings), want)
    assert kernels


@pytest.mark.parametrize(
    ("mode", "sums"),
    [(torch.enable_grad, 0), (torch.no_grad, 4), (torch.inference_mode, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_gradients_and_inference_tensors_go_the_classes_own_way(mode, sums, kernels):
    model = quantized("llama")
    for module in model.modules():
        if isinstance(module, norm.FusedNorm):
            module.requires_grad_(True)
    with torch.no_grad():
        want = without(model)(IDS).logits
        kernels.clear()
    with mode():
        assert torch.equal(model(IDS).logits, want)
    assert len(kernels) == sums
    embedded = model.model.embed_tokens(IDS).detach()  # which may be no inference tensors where sums are
    with mode():
        assert torch.equal(model(inputs_embeds=embedded).logits, want)
    assert len(kernels) == 2 * sums


def add_without_a_version(result):
    result.data.add_(1)


@pytest.mark.parametrize(
    "change", [lambda result: result.add_(1), add_without_a_version], ids=["add", "data"]
)
def test_hooks_see_and_change_what_they_would(kernels, change):
    model = quantized("llama")
    plain, seen = without(model), []
    for one in (model, plain):
        layer = one.model.layers[1]
        layer.input_layernorm.register_forward_hook(lambda *given: seen.append(given[2]))
        layer.post_attention_layernorm.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
        one.model.layers[0].register_forward_hook(lambda module, given, result: change(result))
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    assert torch.equal(*seen)


def test_a_sum_that_was_changed_is_normed_anew(kernels):
    own, x = one_norm(), torch.randn(3, 32).bfloat16()
    with torch.no_grad():
        total = own.add(x, x)
        assert torch.equal(total, 2 * x)
        again = own(total)
        for other in (total.clone(), own.add(x, x).add_(1)):
            assert torch.equal(own(other), type(own).own.forward(own, other))
        assert torch.equal(own(total), again)


def another(own):
    own.weight = nn.Parameter(own.weight.detach() * 2, False)


@pytest.mark.parametrize(
    "change",
    [lambda own: own.weight.mul_(2), another, lambda own: setattr(own, "variance_epsilon", 10.0)],
    ids=["in place", "replaced", "eps"],
)
def test_a_sum_is_normed_anew_by_a_norm_that_was_changed(change, kernels):
    own, x = one_norm().requires_grad_(False), torch.randn(3, 32).bfloat16()
    total = own.add(x, x)
    change(own)
    assert torch.equal(own(total), type(own).own.forward(own, total))


def test_copies_are_without_what_one_call_leaves_for_another(kernels):
    """A layer under a checkpoint adds without gradients, and the norm behind it sees a sum that has them."""
    model = quantized("llama").train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(IDS).logits.sum().backward()
    assert not any(norm._NORMED in vars(module) for module in model.modules())
    own, x = one_norm().requires_grad_(False), torch.randn(3, 32).bfloat16()
    own.add(x, x)
    assert norm._NORMED in vars(own)
    assert norm._NORMED not in vars(pickle.loads(pickle.dumps(own)))


@pytest.mark.parametrize("other", [torch.ones(32), torch.ones(1, 32).bfloat16(), 1.0])
def test_what_is_no_such_sum_is_pytorchs(other, kernels):
    own, x = one_norm(), torch.randn(3, 32).bfloat16()
    with torch.no_grad():
        total = own.add(x, other)
    assert not kernels
    assert torch.equal(total, x + other)


def test_a_gradient_of_what_is_added_is_not_lost(kernels):
    own, x = one_norm().requires_grad_(False), torch.randn(3, 32).bfloat16()
    more = torch.randn(3, 32).bfloat16().requires_grad_()
    own.add(x, more).sum().backward()
    assert torch.equal(more.grad, torch.ones_like(more))


def test_a_sum_lives_no_longer_than_its_norm_waits(kernels):
    own, x = one_norm(), torch.randn(3, 32).bfloat16()
    with torch.no_grad():
        own.add(x, x)
        own(x)
    gc.collect()
    assert norm._NORMED not in vars(own)


def test_copies_pickles_and_names():
    model = quantized("qwen3_next", torch.float32)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for one in (model, again):
        first, second = layers_of(one)
        assert type(first).__name__ == "Qwen3NextDecoderLayer"  # by which layers are not split over devices
        assert vars(first)[residuals._FOLLOWING] == (second.input_layernorm,)
        assert vars(second)[residuals._FOLLOWING] == (one.model.norm,)
        assert "input_layernorm.weight" in first.state_dict()
        assert len(list(first.children())) == 4
    assert model.state_dict().keys() == again.state_dict().keys()
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))  # again, which changes nothing
    assert len(layers_of(model)) == 2
    kbit.dequantize_model(model)
    assert not layers_of(model)
    assert not any(residuals._FOLLOWING in vars(module) for module in model.modules())


def test_positional_arguments_are_the_classes_own_affair(kernels):
    model = quantized("llama")
    layer, x = model.model.layers[0], torch.randn(1, 3, 40).bfloat16()
    positions = model.model.rotary_emb(x, torch.arange(3)[None])
    with torch.no_grad():
        want = layer(x, attention_mask=None, position_embeddings=positions)
        assert len(kernels) == 2
        assert torch.equal(layer(x, None, position_embeddings=positions), want)
    assert len(kernels) == 2


class _Other:
    """Layers that are like Llama's from outside."""

    class Scaled:
        def forward(self, hidden_states, **named):
            x = hidden_states
            x = x + 2 * self.self_attn(hidden_states=self.input_layernorm(x), **named)[0]
            return x + 2 * self.mlp(self.post_attention_layernorm(x))

    class NormBehind:
        def forward(self, hidden_states, **named):
            x = hidden_states
            x = x + self.input_layernorm(self.self_attn(hidden_states=x, **named)[0])
            return x + self.post_attention_layernorm(self.mlp(x))

    class OtherNames:
        def forward(self, hidden_states, mask=None, **named):
            x = hidden_states
            x = x + self.self_attn(hidden_states=self.input_layernorm(x), attention_mask=mask, **named)[0]
            return x + self.mlp(self.post_attention_layernorm(x))

    class DropsOut:
        def forward(self, hidden_states, **named):
            x = hidden_states
            more = self.self_attn(hidden_states=self.input_layernorm(x), **named)[0]
            x = x + nn.functional.dropout(more, 0.3, self.training)
            return x + self.mlp(self.post_attention_layernorm(x))

    class Fails:
        def forward(self, hidden_states, **named):
            raise RuntimeError("not with these")

    class Tuple:
        def forward(self, hidden_states, **named):
            return (hidden_states,)


@pytest.mark.parametrize(
    "name", ["Scaled", "NormBehind", "OtherNames", "DropsOut", "Fails", "Tuple", "patched", "more"]
)
def test_other_layers_stay(name):
    model = build("llama", torch.bfloat16)
    norm.fuse_norms(model)
    for layer in model.model.layers:
        if name == "patched":
            layer.forward = lambda *given, own=layer.forward, **named: own(*given, **named)
        elif name == "more":
            layer.gate = nn.Identity()
        else:
            layer.__class__ = type(name, (nn.Module,), {"forward": getattr(_Other, name).forward})
    residuals.fuse_residuals(model)
    assert not layers_of(model)


def test_random_numbers_of_others_are_left_alone():
    model = build("llama", torch.bfloat16)
    norm.fuse_norms(model)
    for layer in model.model.layers:
        layer.__class__ = type("DropsOut", (nn.Module,), {"forward": _Other.DropsOut.forward})
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    residuals.fuse_residuals(model)
    assert torch.equal(torch.rand(3), want)


def test_torch_compile_gets_the_classes_own_forward(kernels):
    model = quantized("llama")
    layer, x = model.model.layers[0], torch.randn(1, 3, 40).bfloat16()
    positions = model.model.rotary_emb(x, torch.arange(3)[None])
    with torch.no_grad():
        want = layer(x, position_embeddings=positions)
        kernels.clear()
        compiled = torch.compile(layer, backend="aot_eager")
        torch.testing.assert_close(compiled(x, position_embeddings=positions), want, rtol=2**-6, atol=2**-6)
    assert not kernels


@gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu(family, monkeypatch):
    model = quantized(family).cuda()
    runs, run = [], direct.add_rms_norm
    monkeypatch.setattr(direct, "add_rms_norm", lambda *given: runs.append(1) or run(*given))
    plain = without(model)
    with torch.no_grad():
        want = plain(IDS.cuda()).logits
        assert not runs
        assert torch.equal(model(IDS.cuda()).logits, want)
    assert len(runs) == 2 * model.config.num_hidden_layers
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": "static"}
    for one in (model, plain):
        kbit.enable_cuda_graphs(one)
    assert torch.equal(model.generate(IDS.cuda(), **settings), plain.generate(IDS.cuda(), **settings))
