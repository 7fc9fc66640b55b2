"""Kernels that are compiled before they are needed: those of all products of a model, and no others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import kbit
from cuda_on_cpu import H200
from kbit.backends.cuda import ahead, grouped, one_token, preference, resident, tables, variants
from kbit.backends.cuda.ahead import Product
from kbit.backends.cuda.driver import DeviceLimits
from kbit.backends.cuda.weight_shape import WeightShape
from kbit.nn import ahead as of_models
from kbit.nn import quantize_model
from tiny_models import ARCHITECTURES, build

CPU = torch.device("cpu")
A100, AD102 = DeviceLimits(108, 163 * 1024, "80"), DeviceLimits(128, 99 * 1024, "89")
HALVES = st.sampled_from([torch.float16, torch.bfloat16])


def quantized(architecture):
    model = build(architecture, torch.float16, spread=False)
    return quantize_model(model, kbit.KbitConfig(bits=4, embedding_bits=4))


# -- which ---------------------------------------------------------------------------------------------------


@given(
    device=st.sampled_from([H200, A100, AD102]),
    product=st.builds(
        Product,
        st.integers(1, 9000),
        st.integers(1, 9000),
        st.integers(2, 5),
        st.just(False),
        st.sampled_from([0, 0, 1, 8, 128, 512]),
        st.integers(0, 40),
    ),
    tokens=st.lists(st.integers(1, 20000), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
@settings(max_examples=200, deadline=None)
def test_every_kernel_is_one_that_is_ever_launched(device, product, tokens, dtype):
    specs = ahead.kernels([product], tokens, dtype, device, canonical=[product.bits])
    assert len(set(specs)) == len(specs)
    assert set(specs) <= set(variants.all_specs(device.arch))


@given(st.integers(1, 300), HALVES, st.sampled_from([(4096, 4096), (1000, 576), (28672, 8192), (512, 2048)]))
@settings(max_examples=60, deadline=None)
def test_of_one_weight_it_is_the_source_of_the_chosen_kernel(m, dtype, shape):
    weight = WeightShape(*shape, 4, False, H200)
    chosen = preference.decide(m, dtype, weight).kernel
    sources = {spec.source for spec in ahead.kernels([Product(*shape, 4)], [m], dtype, H200)}
    expected = {"stream": "stream.cu", "wgmma": "wgmma.cu", "cublas": "dequantize_tiled.cu"}[chosen]
    assert sources & {"stream.cu", "wgmma.cu", "dequantize_tiled.cu"} == {expected}


def test_of_experts():
    product = Product(1024, 2048, 4, True, 128, 8)
    weight = WeightShape(*product[:4], H200)

    def of(tokens, product=product):
        found = ahead.kernels([product], [tokens], torch.bfloat16, H200)
        names = {"stream.cu", "grouped.cu", "resident.cu", "wgmma.cu"}
        return [spec for spec in found if spec.source in names]

    plan = grouped.plan(8, 128, weight)
    by_rows = plan.config.spec(4, torch.bfloat16, plan.tokens)
    assert of(1) == [one_token.kernel_of(8, torch.bfloat16, weight), by_rows]
    plan = grouped.plan(32, 128, weight)
    assert of(4) == [plan.config.spec(4, torch.bfloat16, plan.tokens)]
    assert [spec.source for spec in of(4096)] == ["wgmma.cu"]
    few = product._replace(experts=8, slots=2)
    plan = resident.plan(8, 8, weight)
    assert of(4, few) == [plan.config.spec(4, torch.bfloat16, plan.tokens)]
    # Not known how many experts a token has: as if one.
    assert [spec.source for spec in of(1, product._replace(slots=0))] == ["grouped.cu"]
    # Of a down projection; its 48 rows would be no gates and ups.
    down = Product(48, 512, 4, False, 128, 8)
    weight = WeightShape(*down[:4], H200)
    assert one_token.kernel_of(8, torch.bfloat16, weight) in of(1, down)


def test_what_is_between_products_is_of_the_dtype():
    for dtype in (torch.float16, torch.bfloat16):
        found = ahead.kernels([Product(64, 64, 4, False, 4, 2)], [1], dtype, H200)
        configs = [dict(spec.config) for spec in found]
        assert all(each.get("bf16", dtype == torch.bfloat16) == (dtype == torch.bfloat16) for each in configs)
        between = {"rms_norm.cu", "rotary.cu", "rotary_angles.cu", "causal_mask.cu", "cache_append.cu"}
        assert between | {"moe_align.cu"} <= {s.source for s in found}
    dense = ahead.kernels([Product(64, 64, 4)], [1], torch.float16, H200)
    assert not any(spec.source.startswith("moe") for spec in dense)


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (2048, 512)])
def test_default_numbers_of_tokens_find_nearly_all(shape):
    (file,) = Path(tables.__file__).parent.glob("tables/*h200*.json")
    arguments = torch.float16, H200, tables.load_all((file,), H200)
    found = set(ahead.kernels([Product(*shape, 4)], ahead.ROWS, *arguments))
    missed = [m for m in range(1, 2500) if set(ahead.kernels([Product(*shape, 4)], [m], *arguments)) - found]
    assert len(missed) < 50
    assert not missed or min(missed) > 1024


# -- of models -----------------------------------------------------------------------------------------------


def test_products_of_a_dense_model(tiles_pay):
    found = set(of_models.products(quantized("qwen3"), CPU))
    # q, k and v are one. Gates and ups, 72 rows each, are not: 16 rows are a tile.
    assert found == {Product(64, 48, 4), Product(48, 32, 4), Product(72, 48, 4), Product(48, 72, 4)}


def test_gates_and_ups_are_one_product(tiles_pay):
    config = ARCHITECTURES["qwen3"]()
    config.intermediate_size = 80
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    found = set(of_models.products(quantize_model(model, kbit.KbitConfig(bits=4)), CPU))
    assert found == {Product(64, 48, 4), Product(48, 32, 4), Product(160, 48, 4, True), Product(48, 80, 4)}


def test_products_of_experts_and_a_shared_one(tiles_pay):
    config = ARCHITECTURES["qwen3_next"]()
    config.moe_intermediate_size = config.shared_expert_intermediate_size = 32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()
    found = set(of_models.products(quantize_model(model, kbit.KbitConfig(bits=4)), CPU))
    # Few tokens with the shared one among the experts, many without, and that by itself.
    assert {one for one in found if one.experts} == {
        Product(64, 48, 4, True, 4, 2),
        Product(64, 48, 4, True, 5, 3),
        Product(48, 32, 4, False, 4, 2),
        Product(48, 32, 4, False, 5, 3),
    }
    assert {Product(64, 48, 4, True), Product(48, 32, 4)} <= found


def test_products_by_another_activation_are_not_gated(tiles_pay):
    model = quantized("qwen3_moe")
    for layer in model.modules():
        if isinstance(layer, kbit.nn.KbitExperts):
            layer.act_fn = torch.nn.GELU()
    experts = [one for one in of_models.products(model, CPU) if one.experts]
    assert experts
    assert not any(one.gated for one in experts)


def test_what_is_not_in_tiles_has_no_product():
    assert not list(of_models.products(quantized("llama"), CPU))


@pytest.fixture
def on_h200(monkeypatch):
    """Models on the CPU count as on an H200; kernels "compiled" are recorded."""

    @dataclass
    class Compiled:
        cached: bool

    compiled = []

    def compile_many(wanted, on_done):
        for spec, arch in wanted:
            on_done(spec, arch, None)
        compiled.extend(wanted)
        return [Compiled(cached=index > 1) for index, _ in enumerate(wanted)]

    monkeypatch.setattr(of_models, "_gpus", lambda model: [CPU])
    monkeypatch.setattr(of_models, "compile_many", compile_many)
    monkeypatch.setattr(of_models, "folder_problem", lambda folder: None)
    monkeypatch.setattr(of_models.driver, "device_limits", lambda index: H200)
    monkeypatch.setattr(of_models.driver, "device_arch", lambda index: "90a")
    monkeypatch.setattr(of_models.tables, "for_device", lambda index: ())
    return compiled


def test_a_models_kernels(tiles_pay, on_h200):
    model, steps = quantized("llama"), []
    count = kbit.compile_kernels(model, tokens=[1, 100], progress=lambda *step: steps.append(step))
    assert count == 2
    assert [step[:2] for step in steps] == [(i + 1, len(on_h200)) for i in range(len(on_h200))]
    sources = {spec.source for spec, _ in on_h200}
    assert {"stream.cu", "wgmma.cu", "rms_norm.cu", "dequantize.cu"} <= sources  # the last for the embedding
    assert all(dict(spec.config).get("bf16", False) is False for spec, _ in on_h200)
    on_h200.clear()
    kbit.compile_kernels(model, tokens=[1], dtype=torch.bfloat16)
    assert all(dict(spec.config).get("bf16", True) is True for spec, _ in on_h200)


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_moe", "qwen3_moe"])
def test_linear_attention(architecture, tiles_pay, on_h200):
    kbit.compile_kernels(quantized(architecture), tokens=[1])
    found = [spec for spec, _ in on_h200 if spec.source == "gated_delta.cu"]
    kinds = [(dict(spec.config)["by_heads"], dict(spec.config)["heads"]) for spec in found]  # of one dtype
    assert kinds == {"qwen3_next": [(True, 2)], "qwen3_5_moe": [(False, 3)], "qwen3_moe": []}[architecture]


@pytest.mark.parametrize("architecture", ["glm4_moe_lite", "qwen3_moe"])
def test_latent_attention(architecture, tiles_pay, on_h200):
    kbit.compile_kernels(quantized(architecture), tokens=[1])
    found = {spec.source for spec, _ in on_h200 if spec.source.startswith("latent")}
    all_of_them = {"latent_attention.cu", "latent_combine.cu", "latent_heads.cu"}
    assert found == (all_of_them if architecture == "glm4_moe_lite" else set())


@pytest.mark.parametrize(("columns", "count"), [(64, 1), (16, 0)])
def test_attention_by_columns_of_its_heads(columns, count, tiles_pay, on_h200):
    model = quantized("qwen3_moe")
    for layer in model.model.layers:
        layer.self_attn.head_dim = columns
    kbit.compile_kernels(model, tokens=[1])
    found = [dict(spec.config) for spec, _ in on_h200 if spec.source == "attention_step.cu"]
    assert [config["columns"] for config in found] == [columns] * count  # of one dtype


def test_scales_in_float16_are_no_activations(tiles_pay, on_h200):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).bfloat16()
    policy = kbit.KbitConfig(bits=4, absmax_format="float16", overrides={"1": 0})
    kbit.compile_kernels(quantize_model(model, policy), tokens=[1])
    assert on_h200
    assert all(dict(spec.config).get("bf16", True) for spec, _ in on_h200)


def test_a_refused_kernel_is_an_error(tiles_pay, on_h200, monkeypatch):
    monkeypatch.setattr(of_models, "compile_many", lambda *_, **__: [kbit.KbitError("refused")])
    with pytest.raises(kbit.KbitError, match="refused"):
        kbit.compile_kernels(quantized("llama"))


def test_where_nothing_can_be_kept_nothing_is_compiled(tiles_pay, on_h200, monkeypatch):
    monkeypatch.setattr(of_models, "folder_problem", lambda folder: "read-only")
    assert kbit.compile_kernels(quantized("llama")) == 0
    assert not on_h200


def test_on_a_cpu_there_is_nothing_to_do():
    assert kbit.compile_kernels(quantized("llama")) == 0


@pytest.mark.parametrize("tokens", [[], [0], [4, -1]])
def test_numbers_of_tokens(tokens):
    with pytest.raises(ValueError, match="numbers from 1 on"):
        kbit.compile_kernels(torch.nn.Linear(1, 1), tokens=tokens)


# -- on a GPU ------------------------------------------------------------------------------------------------

_RUN = """
import sys
import torch, kbit
from pathlib import Path
from tiny_models import ARCHITECTURES
from transformers import AutoModelForCausalLM

config = ARCHITECTURES[sys.argv[1]]()
config.moe_intermediate_size = config.shared_expert_intermediate_size = 32
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().cuda()
kbit.quantize_model(model, kbit.KbitConfig(bits=4, embedding_bits=4))
before = {path.name for path in Path(sys.argv[2]).rglob("*.cubin")}
assert kbit.compile_kernels(model) > 0
ahead = {path.name for path in Path(sys.argv[2]).rglob("*.cubin")}
assert kbit.compile_kernels(model) == 0
with torch.no_grad():
    for tokens in (1, 2, 3, 7, 8, 9, 16, 17, 31, 64, 65, 100, 300, 1000):
        model(torch.randint(0, 72, (1, tokens), device="cuda"))
torch.cuda.synchronize()
after = {path.name for path in Path(sys.argv[2]).rglob("*.cubin")}
print(len(before), len(ahead), sorted(after - ahead))
assert len(ahead) > len(before)
assert not after - ahead
"""


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "glm4_moe_lite", "qwen3_next"])
def test_nothing_is_compiled_later(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("KBIT_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", ":".join(path for path in sys.path if path))
    command = [sys.executable, "-c", _RUN, architecture, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
