"""NVFP4 layers: W4A4 and W4A16, their settings, and the round trip through transformers."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM

import kbit
from kbit.integrations.nvfp4 import NVFP4Config
from kbit.nvfp4 import NonFiniteError, dequantize_nvfp4, gemm_nvfp4, quantize_nvfp4
from kbit.nvfp4.layers import NVFP4Experts, NVFP4Linear, NVFP4Module, NVFP4Settings, replace_layers
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])


class Experts(nn.Module):
    """Laid out and called as transformers' fused experts."""

    def __init__(self, experts: int = 4, hidden: int = 48, width: int = 24) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden, generator=draw) / 7)
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, width, generator=draw) / 5)
        self.act_fn = nn.SiLU()

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.zeros_like(hidden_states)
        for token, (ids, weights) in enumerate(zip(top_k_index.tolist(), top_k_weights, strict=True)):
            for expert, weight in zip(ids, weights, strict=True):
                if expert < len(self.gate_up_proj):
                    gate, up = F.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2)
                    out[token] += weight * F.linear(self.act_fn(gate) * up, self.down_proj[expert])
        return out


def decoded_twin(experts: Experts, layer: NVFP4Experts) -> Experts:
    """The unquantized module with the layer's decoded weights."""
    twin = Experts()
    for mine, theirs in (("gate_up", "gate_up_proj"), ("down", "down_proj")):
        getattr(twin, theirs).data = dequantize_nvfp4(layer.quantized(mine))
    return twin


def inputs(tokens: int = 9) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(4, (tokens, 2), generator=draw)
    return torch.randn(tokens, 48, generator=draw), ids, torch.rand(tokens, 2, generator=draw)


# -- layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_linear_w4a4_is_the_product_of_quantized_operands(bias: bool) -> None:
    linear = nn.Linear(72, 20, bias=bias)
    linear.requires_grad_(False)
    x = torch.randn(2, 3, 72)
    layer = NVFP4Linear.from_linear(linear, NVFP4Settings(), "up")
    a = quantize_nvfp4(x.view(6, 72), row_scale=True)
    expected = gemm_nvfp4(a, layer.quantized("weight"), out_dtype=torch.float32).view(2, 3, 20)
    assert torch.equal(layer(x), expected if linear.bias is None else expected + linear.bias)
    assert float(F.cosine_similarity(layer(x).flatten(), linear(x).flatten(), dim=0)) > 0.97
    assert layer(x.bfloat16()[:, :0]).shape == (2, 0, 20)


def test_linear_w4a16_multiplies_the_decoded_weight_and_has_gradients() -> None:
    linear = nn.Linear(72, 20)
    layer = NVFP4Linear.from_linear(linear, NVFP4Settings(activations="16bit"))
    x = torch.randn(3, 72, requires_grad=True)
    y = layer(x)
    assert torch.equal(y, F.linear(x, dequantize_nvfp4(layer.quantized("weight")), linear.bias))
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_a_bias_of_another_dtype_is_added_in_that_of_the_activations(activations: str) -> None:
    linear = nn.Linear(32, 24).requires_grad_(False)
    layer = NVFP4Linear.from_linear(linear, NVFP4Settings(activations=activations))
    x = torch.randn(3, 32).bfloat16()
    y = layer(x)
    assert y.dtype == torch.bfloat16
    layer.bias = nn.Parameter(linear.bias.bfloat16(), requires_grad=False)
    assert torch.equal(layer(x), y)


def test_row_scales_keep_small_activations() -> None:
    linear = nn.Linear(64, 16, bias=False).requires_grad_(False)
    x = torch.randn(4, 64) * 1e-3
    error = {}
    for row_scale in (False, True):
        layer = NVFP4Linear.from_linear(linear, NVFP4Settings(row_scale=row_scale))
        error[row_scale] = float((layer(x) - linear(x)).norm() / linear(x).norm())
    assert error[True] < 0.2 < error[False]


@pytest.mark.parametrize("row_scale", [True, False])
def test_experts_w4a4_in_every_way_with_the_same_bits(row_scale: bool) -> None:
    experts = Experts()
    x, ids, p = inputs()
    results = []
    for dedup in ("off", "gather", "indirect", "scatter"):
        for fold in (False, True):
            if row_scale and (fold or dedup == "scatter"):
                continue
            settings = NVFP4Settings(row_scale=row_scale, dedup=dedup, fold=fold)
            layer = NVFP4Experts.from_experts(experts, settings)
            results.append(layer(x, ids, p))
    assert len(results) == (3 if row_scale else 8)
    for result in results[1:]:
        assert torch.equal(result, results[0])
    expected = experts(x, ids, p).detach()
    assert float(F.cosine_similarity(results[0].flatten(), expected.flatten(), dim=0)) > 0.96


def test_experts_w4a16_are_the_decoded_ones() -> None:
    experts = Experts()
    layer = NVFP4Experts.from_experts(experts, NVFP4Settings(activations="16bit"))
    x, ids, p = inputs()
    ids[0] = 4  # of another device
    result = layer(x, ids, p)
    assert torch.allclose(result, decoded_twin(experts, layer)(x, ids, p), atol=1e-5)
    assert not result[0].any()


def test_experts_with_another_activation() -> None:
    experts = Experts()
    experts.act_fn = nn.GELU()
    layer = NVFP4Experts.from_experts(experts, NVFP4Settings(activations="16bit"))
    twin = decoded_twin(experts, layer)
    twin.act_fn = nn.GELU()
    assert torch.allclose(layer(*inputs()), twin(*inputs()), atol=1e-5)


def test_weights_with_nan_are_refused_by_name() -> None:
    linear = nn.Linear(32, 4)
    linear.weight.data[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match=r"1 NaN or Inf value .*\(layers.0.up\)"):
        NVFP4Linear.from_linear(linear, NVFP4Settings(), "layers.0.up")


def test_weights_without_data_are_refused_by_name() -> None:
    model = nn.ModuleDict({"up": nn.Linear(32, 32, device="meta")})
    with pytest.raises(ValueError, match=r"the weight is on the meta device \(up\)\. Load the model"):
        replace_layers(model, NVFP4Settings(), lambda name: True)


def test_wrong_inputs_name_the_layer() -> None:
    layer = NVFP4Linear.from_linear(nn.Linear(32, 4), NVFP4Settings(), "layers.0.up")
    with pytest.raises(ValueError, match=r"x has 48 features, the weight expects 32 \(layers.0.up\)"):
        layer(torch.zeros(2, 48))


WRONG_INPUTS = {
    "no tensor": lambda x: x.tolist(),
    "a scalar": lambda x: x[0, 0],
    "no features": lambda x: x[:, :0],
    "other features": lambda x: x[:, :40],
    "float64": lambda x: x.double(),
    "sparse": lambda x: x.to_sparse(),
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
@pytest.mark.parametrize("wrong", WRONG_INPUTS)
def test_whatever_is_wrong_the_layer_is_named(activations: str, wrong: str) -> None:
    settings = NVFP4Settings(activations=activations)
    linear = NVFP4Linear.from_linear(nn.Linear(48, 4), settings, "layers.0.up")
    experts = NVFP4Experts.from_experts(Experts(), settings, "mlp.experts")
    x, ids, weights = inputs()
    with pytest.raises((TypeError, ValueError), match=r"\(layers.0.up\)"):
        linear(WRONG_INPUTS[wrong](x))
    with pytest.raises((TypeError, ValueError), match=r"\(mlp.experts\)"):
        experts(WRONG_INPUTS[wrong](x), ids, weights)


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_compiled_experts_have_the_same_bits(activations: str) -> None:
    experts = NVFP4Experts.from_experts(Experts(), NVFP4Settings(activations=activations))
    x, ids, weights = inputs()
    x = x.bfloat16()
    assert torch.equal(torch.compile(experts)(x, ids, weights), experts(x, ids, weights))


@pytest.mark.parametrize(
    "change",
    [lambda ids: ids + 10, lambda ids: ids + 2**32, lambda ids: ids.float(), lambda ids: ids[:, :0]],
)
def test_ids_of_no_expert_name_the_layer(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    experts = NVFP4Experts.from_experts(Experts(), NVFP4Settings(), "mlp.experts")
    x, ids, weights = inputs()
    with pytest.raises((TypeError, ValueError), match=r"(experts|moe_align): .*\(mlp.experts\)"):
        experts(x, change(ids), weights[:, : change(ids).shape[1]])


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_factors_are_never_cast(activations: str, dtype: torch.dtype) -> None:
    settings = NVFP4Settings(activations=activations)
    linear = NVFP4Linear.from_linear(nn.Linear(48, 20).requires_grad_(False), settings)
    experts = NVFP4Experts.from_experts(Experts(), settings)
    x, ids, weights = inputs()
    bias, linear.bias = linear.bias, None
    expected = linear(x), experts(x, ids, weights)
    linear.bias = bias
    for layer in (linear, experts):
        layer.to(dtype)
        assert all(part.dtype in (torch.uint8, torch.float32) for _, part in layer.parts())
    assert linear.bias.dtype == dtype
    linear.bias = None
    assert torch.equal(linear(x), expected[0])
    assert torch.equal(experts(x, ids, weights), expected[1])


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_experts_refuse_choices_of_other_tokens(activations: str) -> None:
    layer = NVFP4Experts.from_experts(Experts(), NVFP4Settings(activations=activations), "mlp.experts")
    x, ids, weights = inputs()
    with pytest.raises(ValueError, match=r"\(8, 48\), \(9, 2\) and \(9, 2\) \(mlp.experts\)"):
        layer(x[:8], ids, weights)


def test_a_changed_factor_is_noticed() -> None:
    layer = NVFP4Linear.from_linear(nn.Linear(32, 4, bias=False), NVFP4Settings())
    x = torch.randn(2, 32)
    y = layer(x)
    layer.weight_global_scale.data.mul_(2)
    with torch.no_grad():
        layer.weight_global_scale.mul_(2)
    assert torch.equal(layer(x), 4 * y)


def loaded(layer: NVFP4Linear) -> NVFP4Linear:
    state = layer.state_dict()
    state["weight_global_scale"].data.fill_(7)
    layer.load_state_dict(state, assign=True)
    return layer


def applied(layer: NVFP4Linear) -> NVFP4Linear:
    layer.weight_global_scale.data.fill_(7)
    return layer.float()


def filled(layer: NVFP4Linear) -> NVFP4Linear:
    layer.weight_global_scale.data.fill_(7)
    factor = layer.weight_global_scale.data
    layer.fill("weight", dataclasses.replace(layer.quantized("weight"), global_scale=factor))
    return layer


def saved_and_loaded(layer: NVFP4Linear) -> NVFP4Linear:
    for value in (3, 7):
        layer.quantized("weight")
        with torch.no_grad():
            layer.weight_global_scale.fill_(value)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("change", [loaded, applied, filled, saved_and_loaded])
def test_a_fetched_factor_is_not_used_for_another(
    change: Callable[[NVFP4Linear], NVFP4Linear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # a copy, as from a GPU
    layer = NVFP4Linear.from_linear(nn.Linear(32, 4, bias=False), NVFP4Settings())
    fetched = layer.quantized("weight").global_scale
    assert layer.quantized("weight").global_scale.data_ptr() == fetched.data_ptr()
    changed = change(layer)
    assert float(changed.weight_global_scale) == 7
    assert float(changed.quantized("weight").global_scale) == 7


def test_no_other_factor_gets_the_address_of_a_fetched_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)  # a copy, as from a GPU
    layer = NVFP4Linear.from_linear(nn.Linear(32, 4, bias=False), NVFP4Settings())
    memory = np.array(7.0, dtype=np.float32)
    layer.weight_global_scale = nn.Parameter(torch.from_numpy(memory), requires_grad=False)
    layer.quantized("weight")
    alive = weakref.ref(memory)
    del memory, layer.weight_global_scale
    assert alive() is not None
    layer.weight_global_scale = nn.Parameter(torch.tensor(3.0), requires_grad=False)
    assert float(layer.quantized("weight").global_scale) == 3
    assert alive() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activations": "8bit"}, "activations must be one of nvfp4, 16bit, got '8bit'"),
        ({"accum": "fast"}, "accum must be one of"),
        ({"ties": "up"}, "ties must be one of"),
        ({"dedup": "on"}, "dedup must be one of"),
        ({"fold": True}, "Set row_scale=False"),
        ({"dedup": "scatter"}, "Set row_scale=False"),
    ],
)
def test_settings_are_checked(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NVFP4Settings(**changes)


def test_replacing_skips_what_is_tied_or_not_chosen() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(8, 32), "head": nn.Linear(32, 8, bias=False)})
    model["up"], model["router"] = nn.Linear(32, 32), nn.Linear(32, 4)
    model["head"].weight = model["embed"].weight
    assert replace_layers(model, NVFP4Settings(), lambda name: name != "router") == ["up"]
    assert type(model["head"]) is nn.Linear


def test_a_module_of_several_names_is_replaced_under_each() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ModuleDict({"experts": Experts()}))
    model.append(model[3])
    x = torch.randn(3, 32)
    assert replace_layers(model, NVFP4Settings(activations="16bit"), lambda name: True) == ["0", "3.experts"]
    assert type(model[0]) is NVFP4Linear
    assert model[2] is model[0]
    assert type(model[4]["experts"]) is NVFP4Experts
    assert torch.equal(model[:3](x), model[0](model[0](x).relu()))
    # Nothing of it is quantized where one of its names is left out.
    other = nn.ModuleDict({"up": shared, "head": shared})
    assert not replace_layers(other, NVFP4Settings(), lambda name: name != "head")


# -- transformers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next", "mixtral", "llama"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    build(request.param, torch.bfloat16, spread=False).save_pretrained(folder)
    return folder


def load(folder: Path, config: NVFP4Config | None = None) -> nn.Module:
    given = {} if config is None else {"quantization_config": config}
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **given)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@pytest.mark.parametrize("activations", ["nvfp4", "16bit"])
def test_quantize_on_load_save_and_reload(source: Path, tmp_path: Path, activations: str) -> None:
    base = load(source)
    model = load(source, kbit.NVFP4Config(activations=activations, accum="seq16"))
    layers = {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, NVFP4Module)}
    assert layers
    assert not any(name.endswith((".gate", "lm_head")) for name in layers)
    with torch.no_grad():
        logits, expected = model(IDS).logits, base(IDS).logits
    assert float(F.cosine_similarity(logits.float().flatten(), expected.float().flatten(), dim=0)) > 0.9
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (stored["quant_method"], stored["activations"]) == ("kbit_nvfp4", activations)
    again = load(tmp_path)
    for name, tensor in model.state_dict().items():
        other = again.state_dict()[name]
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other), name
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, logits)
    generated = [m.generate(IDS, max_new_tokens=3, do_sample=False) for m in (model, again)]
    assert torch.equal(*generated)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path / "source")
    load(tmp_path / "source", NVFP4Config()).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_layers_on_disk_are_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"layers\.1 on disk, where .*accelerate\.disk_offload"):
        AutoModelForCausalLM.from_pretrained(saved, device_map={"": "cpu", "model.layers.1": "disk"})


CHECK = """
import sys
{imports}
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model.model.layers[0].mlp.experts).__name__ == "NVFP4Experts"
"""


@pytest.mark.parametrize(
    "imports",
    ["import kbit", "import transformers.quantizers\nimport kbit", "import kbit.integrations.nvfp4"],
)
def test_importing_kbit_suffices_to_load(saved: Path, imports: str) -> None:
    subprocess.run([sys.executable, "-c", CHECK.format(imports=imports), str(saved)], check=True)


CODES = "model.layers.0.mlp.experts.gate_up_codes"
DAMAGE = {
    "missing": (CODES, None, "has no tensor"),
    "shape": (CODES, lambda t: t[:2].contiguous(), "must be torch.uint8"),
    "dtype": (CODES, lambda t: t.to(torch.int32), "got torch.int32"),
    "scale": ("model.layers.0.mlp.experts.down_scales", lambda t: t.fill_(0xFF), "negative or NaN"),
    "factor": ("model.layers.0.mlp.experts.down_global_scale", lambda t: t * 0, "positive normal float32"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_checkpoints_are_refused(saved: Path, case: str) -> None:
    name, change, message = DAMAGE[case]
    tensors = load_file(saved / "model.safetensors")
    value = tensors.pop(name)
    if change is not None:
        tensors[name] = change(value)
    save_file(tensors, saved / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(saved)


def replaced(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, NVFP4Module)]


def test_modules_can_be_left_out(tmp_path: Path) -> None:
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path / "source")
    skipped = ["model.layers.0.self_attn", "model.layers.1"]
    model = load(tmp_path / "source", NVFP4Config(modules_to_not_convert=skipped))
    assert replaced(model) == ["model.layers.0.mlp.experts"]
    model.save_pretrained(tmp_path / "saved")
    assert replaced(load(tmp_path / "saved")) == replaced(model)
    headless = AutoModel.from_pretrained(tmp_path / "saved")
    assert replaced(headless) == ["layers.0.mlp.experts"]
    with torch.no_grad():
        assert torch.equal(headless(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


def test_a_skip_of_another_class_of_model_leaves_no_codes_unread(tmp_path: Path) -> None:
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path / "source")
    config = NVFP4Config(modules_to_not_convert=["layers.0", "model.layers.1"])
    with pytest.warns(UserWarning, match="no module for skip 'model.layers.1'"):
        headless = AutoModel.from_pretrained(tmp_path / "source", quantization_config=config)
    headless.save_pretrained(tmp_path / "saved")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert replaced(whole) == [f"model.{name}" for name in replaced(headless)]
    with torch.no_grad():
        assert torch.equal(whole.model(IDS).last_hidden_state, headless(IDS).last_hidden_state)


@pytest.mark.parametrize(
    "skipped",
    ["model.layers.1", "layers.1", "self_attn", "model.layers.0.self_attn.q_proj", "re:.*q_proj", "*q_proj*"],
)
def test_skips_match_as_those_of_a_policy(skipped: str) -> None:
    config = NVFP4Config(modules_to_not_convert=[skipped])
    policy = kbit.QuantizationPolicy(modules_to_not_convert=[skipped])
    for name in (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.10.mlp.experts",
    ):
        assert config.chooses(name) == (policy.bits_for(name) is not None)
        assert config.chooses("stored.name", name) == (policy.bits_for("stored.name", name) is not None)


@pytest.mark.parametrize(
    "name", ["mlp.gate", "mlp.gate.wg", "router", "ffn.router.layer", "mlp.router.classifier", "lm_head"]
)
def test_nothing_inside_a_router_is_chosen(name: str) -> None:
    config = NVFP4Config()
    assert not config.chooses(name)
    assert not config.chooses(f"model.layers.0.{name}")
    assert config.chooses("model.layers.0.mlp.gate_proj")
    assert config.chooses("model.layers.0.linear_attn.gates.up")


def test_skips_of_no_module_are_reported(tmp_path: Path) -> None:
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path)
    config = NVFP4Config(modules_to_not_convert=["self_attn", "re:.*q_proj", "lm_head"])
    message = r"no module for skip 'self_attn' \(nearest: model\.layers\.\*\.self_attn\), skip 're:"
    with pytest.warns(UserWarning, match=message) as warned:
        load(tmp_path, config)
    assert not any("lm_head" in str(each.message) for each in warned)


def test_layers_stored_unquantized_are_missed_by_name(tmp_path: Path) -> None:
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path / "source")
    config = NVFP4Config(modules_to_not_convert=["model.layers.1"])
    load(tmp_path / "source", config).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "config.json"
    file.write_text(file.read_text().replace('"model.layers.1"', '"layers.1"'))
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*lack this module's whole name"):
        load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"quant_method": "fp8"}, ValueError, "expected kbit_nvfp4"),
        ({"version": 2}, ValueError, "version 2"),
        ({"bits": 4}, ValueError, "unknown field 'bits'"),
        ({"version": True}, ValueError, "version True"),
        *(({"modules_to_not_convert": v}, TypeError, "must be a list of names") for v in ("lm_head", 5, [5])),
        *(({name: "no"}, TypeError, f"{name} must be True") for name in ("search", "row_scale", "fold")),
        ([1], TypeError, "quantization_config must be an object, got list"),
    ],
)
def test_configs_are_checked(values: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        NVFP4Config.from_dict(values)


def test_config_round_trip() -> None:
    config = NVFP4Config(accum="tc", row_scale=False, fold=True, modules_to_not_convert={"a"})
    assert NVFP4Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    changed, unused = NVFP4Config.from_dict(config.to_dict(), return_unused_kwargs=True, accum="exact", x=1)
    assert (changed.accum, unused) == ("exact", {"x": 1})


@torch.inference_mode()
def test_a_layer_made_in_inference_mode_multiplies() -> None:
    linear, x = nn.Linear(32, 4, bias=False), torch.randn(2, 32)
    layer = NVFP4Linear.from_linear(linear, NVFP4Settings())
    assert layer(x).shape == (2, 4)


@pytest.mark.parametrize(
    ("kind", "activations"), [("linear", "nvfp4"), ("experts", "nvfp4"), ("experts", "16bit")]
)
def test_what_has_no_gradient_says_so(kind: str, activations: str) -> None:
    settings, rest = NVFP4Settings(activations=activations), ()
    if kind == "linear":
        layer = NVFP4Linear.from_linear(nn.Linear(48, 8), settings, "proj")
    else:
        layer = NVFP4Experts.from_experts(Experts(), settings, "experts")
        rest = (torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5))
    x = torch.randn(3, 48)
    expected = layer(x, *rest)
    y = layer(x.clone().requires_grad_(), *rest)
    assert torch.equal(y, expected)
    with pytest.raises(NotImplementedError, match=r"NVFP4: there is no gradient of .*(proj|experts)"):
        y.sum().backward()
    remedy = r"\. Linear layers with activations='16bit' have one\.$"
    with pytest.raises(NotImplementedError, match=f"forward-mode.*{remedy}"):
        torch.func.jvp(lambda a: layer(a, *rest), (x,), (x,))
    with pytest.raises(NotImplementedError, match=rf"torch\.func.*{remedy}"):
        torch.func.grad(lambda a: layer(a, *rest).sum())(x)
