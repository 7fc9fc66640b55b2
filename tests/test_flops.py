"""torch.utils.flop_counter: products with quantized weights count as those with 16-bit ones do."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import kbit
from kbit.integrations import flops
from kbit.nn import KbitExperts, KbitLinear
from kbit.ops.schemas import SCHEMAS
from kbit.ops.tiled_schemas import SCHEMAS as TILED
from test_merged import MLP, X
from test_nn import Experts, routed

ROWS, IN, OUT = 6, 96, 40
PRODUCT = 2 * ROWS * IN * OUT


def count(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def test_every_product_has_a_formula():
    products = {name for name in SCHEMAS | TILED if not name.startswith(("dequantize", "embedding"))}
    assert products <= set(flops.FORMULAS)
    assert {getattr(torch.ops.kbit, name) for name in flops.FORMULAS} <= set(flop_registry)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_counts_as_a_16_bit_one(trained, tiled, request):
    if tiled:
        request.getfixturevalue("tiles_pay")
    plain = nn.Linear(IN, OUT)
    plain.weight.requires_grad_(False)
    layer = KbitLinear.from_linear(plain)
    x = torch.randn(2, ROWS // 2, IN, requires_grad=trained)

    def call(of):
        y = of(x)
        if trained:
            y.sum().backward()

    plain.bias.requires_grad_(trained)
    assert count(lambda: call(layer)) == count(lambda: call(plain)) == PRODUCT * (1 + trained)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
def test_grouped_products(tiled, trained):
    q = kbit.quantize(torch.randn(3, OUT, IN))
    q = q.tile() if tiled else q
    x = torch.randn(ROWS, IN, requires_grad=trained)
    offsets = torch.tensor([0, 1, 1, ROWS], dtype=torch.int32)

    def call():
        y = kbit.grouped_linear(x, q, offsets)
        if trained:
            y.sum().backward()

    assert count(call) == PRODUCT * (1 + trained)


def test_results_that_go_elsewhere():
    q, out = kbit.quantize(torch.randn(OUT, IN)), torch.empty(ROWS, OUT)
    assert count(lambda: kbit.linear(torch.randn(ROWS, IN), q, out=out)) == PRODUCT


@torch.no_grad()
def test_merged_layers(tiles_pay):
    model = nn.ModuleDict({"mlp": MLP().half()})
    want = count(lambda: model["mlp"](X))
    mlp = kbit.quantize_model(model, kbit.KbitConfig(bits=4))["mlp"]
    assert type(mlp).__name__ == "MergedMLP"
    assert count(lambda: mlp(X)) == want


@pytest.mark.parametrize("tiled", [False, True])
@torch.no_grad()
def test_experts(tiled, request):
    if tiled:
        request.getfixturevalue("tiles_pay")
    plain, (x, ids, weights) = Experts(), routed()
    layer = KbitExperts.from_experts(plain, 4, kbit.QuantizationPolicy())
    inner = layer.intermediate_dim
    want = 2 * ids.numel() * 3 * x.shape[1] * inner
    assert count(lambda: layer(x, ids, weights)) == want


@torch.no_grad()
def test_experts_with_a_shared_one_and_logits():
    rows, features, inner, experts = 4, 64, 32, 3
    choices, weights = (rows, 3), [(1,)]
    given = (rows, features), weights, weights, (16,), (4,), choices, choices, inner
    assert flops.FORMULAS["experts_with_shared"](*given) == 2 * rows * 3 * 3 * features * inner
    x, weight, last = (torch.randn(count, features) for count in (rows, experts, 1))
    logits = torch.ops.kbit.moe_logits
    assert count(lambda: logits(x, weight)) == 2 * rows * features * experts
    assert count(lambda: logits(x, weight, None, last)) == 2 * rows * features * (experts + 1)


@pytest.mark.parametrize("imports", ["kbit, torch.utils.flop_counter", "torch.utils.flop_counter, kbit"])
def test_the_order_of_imports_does_not_matter(imports):
    code = f"import {imports}; print(torch.ops.kbit.linear in torch.utils.flop_counter.flop_registry)"
    said = subprocess.run(
        [sys.executable, "-c", f"import torch; {code}"], capture_output=True, text=True, check=True
    )
    assert said.stdout.split() == ["True"]


def test_kbit_does_not_import_the_counter():
    code = "import sys, torch; had = 'torch.utils.flop_counter' in sys.modules; import kbit; "
    code += "print(had or 'torch.utils.flop_counter' not in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True"]
