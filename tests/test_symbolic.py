"""torch.fx: calls of quantized layers are nodes of a graph, as those of PyTorch's own layers are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

import kbit
from kbit.nn import KbitEmbedding, KbitExperts, KbitLinear, QuantizedModule
from test_merged import MLP, Attention
from test_nn import Experts, routed


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.mlp, self.head = nn.Embedding(50, 64), MLP(), nn.Linear(64, 50)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.mlp(self.table(ids)))


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = KbitExperts.from_experts(Experts(), 4, kbit.QuantizationPolicy())

    def forward(self, x, ids, weights):
        return self.experts(x, ids, weights)


IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])


def words():
    return kbit.quantize_model(Words().eval(), kbit.KbitConfig(bits=4, overrides={"table|head": 4}))


def called(graph):
    return [str(node.target) for node in graph.nodes if node.op == "call_module"]


@pytest.mark.parametrize("changed", [fx.GraphModule.eval, copy.deepcopy, fx.symbolic_trace])
def test_a_model_is_traced_and_computes_the_same(changed, tiles_pay):
    model = words()
    assert isinstance(model.table, KbitEmbedding)
    assert isinstance(model.head, KbitLinear)
    traced = changed(fx.symbolic_trace(model))
    names = ["table", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj", "head"]
    assert called(traced.graph) == names
    assert torch.equal(traced(IDS), model(IDS))


def test_projections_are_traced(tiles_pay):
    model = kbit.quantize_model(nn.Sequential(Attention(32, 16, 40)).eval(), kbit.KbitConfig(bits=4))
    assert type(model[0]).__name__ == "MergedAttention"
    traced, x = fx.symbolic_trace(model), torch.randn(3, 64)
    assert called(traced.graph) == ["0.q_proj", "0.k_proj", "0.v_proj"]
    assert torch.equal(traced(x), model(x))


def test_experts_are_traced():
    model, given = Routed(), routed()
    traced = fx.symbolic_trace(model)
    assert called(traced.graph) == ["experts"]
    assert torch.equal(traced(*given), model(*given))


LAYERS = {
    "KbitLinear": lambda: KbitLinear.from_linear(nn.Linear(64, 64)),
    "KbitEmbedding": lambda: KbitEmbedding.from_embedding(nn.Embedding(50, 64)),
    "KbitExperts": lambda: Routed().experts,
}


@pytest.mark.parametrize("made", LAYERS.values(), ids=LAYERS)
def test_a_layer_by_itself_says_what_to_do(made):
    with pytest.raises(TypeError, match=r"cannot trace Kbit\w+ by itself\. Trace a module that holds it"):
        fx.symbolic_trace(made())


class Leaves(fx.Tracer):
    """As the message says."""

    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, QuantizedModule) or super().is_leaf_module(m, module_qualified_name)


def hooked(model):
    model.head.register_forward_pre_hook(lambda layer, args: (2 * args[0],))


def replaced(model):
    model.head.forward = lambda x: KbitLinear.forward(model.head, 2 * x)


class Doubling(KbitLinear):
    def forward(self, input):
        return super().forward(2 * input)


def subclassed(model):
    model.head.__class__ = Doubling


@pytest.mark.parametrize("change", [hooked, replaced, subclassed])
def test_what_would_run_twice_is_refused(change):
    model = words()
    change(model)
    with pytest.raises(TypeError, match=r"\(head\), which has hooks or a forward of its own.*is_leaf_module"):
        fx.symbolic_trace(model)
    graph = fx.GraphModule(model, Leaves().trace(model))
    assert torch.equal(graph(IDS), model(IDS))


@pytest.mark.parametrize("made", LAYERS.values(), ids=LAYERS)
def test_other_inputs_are_refused_as_before(made):
    layer, more = made(), ([[0]], [[1.0]])
    with pytest.raises(TypeError, match="must be a tensor, got list"):
        layer([1, 2], *(more if isinstance(layer, KbitExperts) else ()))
