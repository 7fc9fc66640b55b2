"""A router's logits that are made with the norm in front of it. No GPU is needed but for the last tests."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kbit
from kbit.backends import cuda
from kbit.backends.cuda import norm_logits, router_logits
from kbit.nn import router
from kbit.nn.residuals import FusedResiduals
from kbit.ops import direct
from tiny_models import ARCHITECTURES

ops = torch.ops.kbit
gpu = pytest.mark.gpu
FAMILIES = ("qwen3_moe", "qwen3_next", "glm4_moe_lite", "mixtral")
IDS = torch.tensor([[3], [1]])


@pytest.fixture
def kernels(tiles_pay, monkeypatch):
    """As if the CPU had them; how often that of norm and logits ran."""
    runs = []

    def both(x, added, weight, eps, plus_one, round_first, gate, last, dtype):
        runs.append(last is not None)
        total, normed = ops.add_rms_norm(x, added, weight, eps, plus_one, round_first)
        return total, normed, ops.moe_logits(normed.view(-1, x.shape[-1]), gate, dtype, last)

    monkeypatch.setattr(direct, "has_rms_norm", lambda x: True)
    monkeypatch.setattr(direct, "add_rms_norm_logits", both)
    monkeypatch.setattr(router.FusedRouter, "takes", lambda self, x: not torch.is_grad_enabled())
    return runs


class Logits(TorchDispatchMode):
    """Counts products by routers."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is ops.moe_logits.default
        return func(*args, **kwargs or {})


def build(family, hidden=64, **sizes):
    from transformers import AutoModelForCausalLM

    config = ARCHITECTURES[family]()
    config.hidden_size, config.mlp_only_layers = hidden, []
    config.moe_intermediate_size = config.shared_expert_intermediate_size = 32
    for name, value in sizes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return kbit.quantize_model(model, kbit.QuantizationPolicy(bits=4, search=False))


def routers_of(model):
    choose = (one for one in model.modules() if isinstance(one, router.FusedRouter))
    return [one for one in choose if not isinstance(one, router.SharedGate)]


@torch.no_grad()
def apart(model, monkeypatch):
    """What a model gives whose norms and logits are made one after the other."""
    with monkeypatch.context() as patch:
        patch.setattr(direct, "add_rms_norm_logits", lambda *_: None)
        return model(IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_models_make_every_logit_once(family, kernels, monkeypatch):
    model = build(family)
    layers = len(routers_of(model))
    assert layers
    with torch.no_grad(), Logits() as products:
        have = model(IDS).logits
    assert len(kernels) == layers
    assert products.count == layers
    assert not any(router._MADE in vars(module) for module in model.modules())
    assert torch.equal(have, apart(model, monkeypatch))


def test_the_gate_of_a_shared_expert_is_a_row_more(kernels):
    model = build("qwen3_next")
    with torch.no_grad():
        model(IDS)
    assert kernels == [True] * len(routers_of(model))
    for block in model.modules():
        if hasattr(block, "factors"):
            block.factors = None  # as where the shared expert stays apart
    kernels.clear()
    with torch.no_grad(), Logits() as products:
        model(IDS)
    assert kernels == [False] * len(routers_of(model))
    assert products.count == 2 * len(kernels)  # the gate's own


def write(module, args):
    args[0].mul_(2)


def replace(module, args):
    return args[0] * 2


def weigh(module, args):
    for name, weight in module.named_parameters():
        if name in ("gate.weight", "shared_expert_gate.weight", "weight"):
            weight.data.neg_()


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("hook", [write, replace, weigh])
@pytest.mark.parametrize("where", ["norm", "block", "router"])
def test_what_hooks_change_has_other_logits(family, hook, where, kernels, monkeypatch):
    model = build(family)
    for layer in model.modules():
        if isinstance(layer, FusedResiduals) and where == "norm":
            layer.post_attention_layernorm.register_forward_hook(lambda _, args, y: hook(_, (y,)))
        elif isinstance(layer, FusedResiduals):
            (layer.mlp if where == "block" else layer.mlp.gate).register_forward_pre_hook(hook)
    again = copy.deepcopy(model)  # as it is before a hook has run
    with torch.no_grad():
        have = model(IDS).logits
    assert torch.equal(have, apart(again, monkeypatch))


def test_gradients_and_routers_that_changed_go_the_model_s_way(kernels):
    model = build("qwen3_moe")
    model(IDS)
    assert not kernels
    for layer in model.modules():
        if isinstance(layer, FusedResiduals):
            gate = layer.mlp.gate
            gate.__class__ = gate.own
    with torch.no_grad():
        model(IDS)
    assert not kernels


def test_logits_that_nobody_asked_for_are_forgotten(kernels, monkeypatch):
    model = build("qwen3_moe")
    (one, *_) = routers_of(model)
    x = torch.randn(1, 2, 64, dtype=torch.bfloat16)
    weight = torch.ones(64, dtype=torch.bfloat16)
    with torch.no_grad():
        _, normed = one.add_rms_norm(None, x, x, weight, 1e-6, False, True)
        assert router._MADE in vars(one)
        made, gate = vars(one)[router._MADE], one.weight
        assert made.are_of(normed, gate, None)
        assert made.are_of(normed.view(2, 64), gate, None)
        for other in (normed.clone(), normed[:, :1], normed.view(4, 32), normed.view(2, 64).t()):
            assert not made.are_of(other, gate, None)
        assert not made.are_of(normed, gate, x[0, :1])
        assert not made.are_of(normed, gate.clone(), None)
        assert one.logits(normed) is made.logits
        assert router._MADE not in vars(one)
        for written in (gate, x[0, :1].clone()):
            last = None if written is gate else written
            _, normed = one.add_rms_norm(last, x, x, weight, 1e-6, False, True)
            written.neg_()
            assert not vars(one)[router._MADE].are_of(normed, gate, last)
        monkeypatch.setattr(router.FusedRouter, "takes", lambda self, x: False)
        one(normed.view(2, 64))
    assert router._MADE not in vars(one)


# -- on a GPU ------------------------------------------------------------------------------------------------


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("experts", "columns"), [(512, 2048), (128, 2048), (64, 2048), (8, 4096), (7, 2056), (3, 8192)]
)
def test_the_kernel_equals_norm_and_logits_bit_for_bit(experts, columns, dtype):
    def random(*shape):
        return torch.randn(*shape, device="cuda").to(dtype)

    for tokens in (1, 2, 3, 8):
        x, added = random(1, tokens, columns), random(1, tokens, columns)
        weight, gates, last = random(columns), random(experts, columns), random(1, columns)
        kinds = [(False, False, None, gates), (True, True, last, gates)]
        kinds.append((False, True, last.float(), torch.randn(experts, columns, device="cuda")))
        for plus_one, wide, more, gate in kinds:
            if not norm_logits.takes(x, added, weight, gate, more):
                assert tokens * experts > 1024
                continue
            how = (weight, 1e-6, plus_one, not plus_one)
            out = torch.float32 if wide else None
            total, normed = ops.add_rms_norm(x, added, *how)
            logits = ops.moe_logits(normed.view(tokens, columns), gate, out, more)
            for _ in range(100):
                made = direct.add_rms_norm_logits(x, added, *how, gate, more, out)
                assert all(map(torch.equal, made, (total, normed, logits)))


@gpu
def test_weights_written_just_before_are_read():
    x, weight = (torch.randn(*shape, device="cuda").half() for shape in ((1, 2048), (2048,)))
    gate, newer = torch.randn(2, 512, 2048, device="cuda").half()
    want = direct.add_rms_norm_logits(x, x, weight, 1e-6, False, True, newer, None, None)
    for _ in range(100):
        written = gate.clone()
        written.copy_(newer)
        have = direct.add_rms_norm_logits(x, x, weight, 1e-6, False, True, written, None, None)
        assert all(map(torch.equal, have, want))


@gpu
def test_a_graph_records_it():
    def random(*shape):
        return torch.randn(*shape, device="cuda").bfloat16()

    x, added, weight, gate = random(2, 2048), random(2, 2048), random(2048), random(128, 2048)
    operands = (x, added, weight, 1e-6, False, True, gate, None, torch.float32)
    direct.add_rms_norm_logits(*operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = direct.add_rms_norm_logits(*operands)
    for changed in (x, added, weight, gate):
        changed.copy_(random(*changed.shape))
    graph.replay()
    assert all(map(torch.equal, recorded, direct.add_rms_norm_logits(*operands)))


@gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_models_on_a_gpu(family, monkeypatch):
    model = build(family, hidden=1024).cuda()
    ids, runs, run = IDS.cuda(), [], norm_logits.add_rms_norm_logits
    with torch.no_grad():
        monkeypatch.setattr(norm_logits, "add_rms_norm_logits", lambda *given: runs.append(1) or run(*given))
        have = model(ids).logits
        assert len(runs) == len(routers_of(model))
        monkeypatch.setattr(norm_logits, "takes", lambda *_: False)
        assert torch.equal(model(ids).logits, have)


@gpu
def test_weights_of_routers_in_float32(monkeypatch):
    """As transformers keeps DeepSeek's and GLM's from 5.24 on."""
    model, ids = build("glm4_moe_lite", hidden=1024).cuda(), IDS.cuda()
    runs, run = [], router_logits.moe_logits
    with torch.no_grad():
        for one in routers_of(model):
            one.weight = torch.nn.Parameter(torch.randn_like(one.weight, dtype=torch.float32))
        have = model(ids).logits
        monkeypatch.setattr(cuda, "moe_logits", lambda *given: runs.append(1) or run(*given))
        assert torch.equal(model(ids).logits, have)
        assert not runs
        monkeypatch.setattr(norm_logits, "takes", lambda *_: False)
        assert torch.equal(model(ids).logits, have)
        assert len(runs) == len(routers_of(model))
