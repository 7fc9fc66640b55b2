"""transformers: what does not fit gets one clear error, before or instead of a model with wrong weights."""

import json

import accelerate
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.core_model_loading import Concatenate, WeightConverter

import kbit
from kbit.format.safetensors_header import TensorInfo
from kbit.integrations.transformers import names
from kbit.integrations.transformers.plan import build_plan
from tiny_models import build

AutoModelForCausalLM = transformers.AutoModelForCausalLM


@pytest.fixture
def source(tmp_path):
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def saved(source, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(source, quantization_config=kbit.KbitConfig(bits=4))
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        section = config["quantization_config"] if key in config["quantization_config"] else config
        section[key] = value
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.experts.2.up_proj.weight"]
)
def test_nan_weights_are_named(name, source):
    def poison(tensors):
        tensors[name][1, :2] = torch.nan

    edit_weights(source, poison)
    with pytest.raises(kbit.NonFiniteWeightError, match=rf"{name} holds 2 NaN"):
        AutoModelForCausalLM.from_pretrained(source, quantization_config=kbit.KbitConfig())


def test_a_truncated_file(saved):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="truncated"):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0, -1.0, 3.0])
@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("self_attn.k_proj.weight", "self_attn.k_proj.weight"),
        ("mlp.experts.1.down_proj.weight", "mlp.experts.down_proj"),
    ],
)
def test_a_factor_that_is_no_power_of_two(name, owner, value, saved):
    def spoil(tensors):
        for expert in range(4):
            tensors[f"model.layers.0.{name.replace('1', str(expert))}_scale"] = torch.ones(())
        tensors[f"model.layers.0.{name}_scale"] = torch.tensor(value)

    edit_weights(saved, spoil)
    message = rf"model\.layers\.0\.{owner}_scale must be a power of two above zero, got {value}"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"device_map": {"": "cpu", "model.layers.1": "disk"}}, "model.layers.1"),
        ({"device_map": {"": "disk"}}, "the model"),
        ({"device_map": "auto", "max_memory": {"cpu": 30_000}}, "model"),
    ],
)
def test_layers_on_disk_are_refused_and_offloaded_afterwards(options, where, saved, source, tmp_path):
    for folder, config in ((saved, {}), (source, {"quantization_config": kbit.KbitConfig()})):
        with pytest.raises(ValueError, match=rf"{where}.* on disk, where .*accelerate\.disk_offload"):
            AutoModelForCausalLM.from_pretrained(folder, **options, **config)
    model, ids = AutoModelForCausalLM.from_pretrained(saved), torch.tensor([[1, 5, 9]])
    expected = model(ids).logits
    accelerate.disk_offload(model, tmp_path / "weights", execution_device="cpu")
    assert model.lm_head.weight.device.type == "meta"
    assert torch.equal(model(ids).logits, expected)


def test_a_newer_version(saved):
    edit_config(saved, version=99)
    with pytest.raises(ValueError, match="version 99.*Upgrade kbit"):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 3}, "at 3 bits"),
        ({"overrides": {"q_proj": 5}}, "q_proj.*at 5 bits"),
        ({"modules_to_not_convert": ["model.layers.0"]}, "leaves module 'model.layers.0"),
        ({"num_key_value_heads": 2}, r"k_proj.weight_packed.*has shape \(16, 8\), the model needs \(32, 8\)"),
        ({"num_experts": 8, "num_local_experts": 8}, "it has 8 experts"),
        ({"hidden_size": 96}, "shape"),
        ({"bits": 9}, "bits must be one of"),
        ({"absmax_format": "float32"}, "float32"),
    ],
)
def test_config_and_weights_of_different_models(changes, message, saved):
    edit_config(saved, **changes)
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize("suffix", ["_packed", "_absmax"])
def test_a_missing_part(suffix, saved):
    edit_weights(saved, lambda tensors: tensors.pop("model.layers.0.mlp.experts.1.up_proj.weight" + suffix))
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_missing_expert(saved):
    def drop(tensors):
        for suffix in ("_packed", "_absmax"):
            tensors.pop("model.layers.0.mlp.experts.3.up_proj.weight" + suffix)

    edit_weights(saved, drop)
    with pytest.raises(ValueError, match="it has 4 experts and the checkpoint"):
        AutoModelForCausalLM.from_pretrained(saved)


@pytest.mark.parametrize(
    ("module", "also"),
    [("model.layers.0.self_attn.q_proj", ""), ("model.layers.0.mlp.experts", ".gate_up_proj")],
)
def test_a_missing_module(module, also, saved):
    def drop(tensors):
        for name in [name for name in tensors if name.startswith(module)]:
            tensors.pop(name)

    edit_weights(saved, drop)
    with pytest.raises(ValueError, match=rf"holds no tensors.* of .*{module}{also or '.weight'}"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_missing_module_that_its_class_can_do_without(saved, monkeypatch):
    name = "model.layers.0.self_attn.q_proj.weight"
    edit_weights(saved, lambda tensors: [tensors.pop(name + suffix) for suffix in ("_packed", "_absmax")])
    monkeypatch.setattr(
        transformers.Qwen3MoeForCausalLM, "_keys_to_ignore_on_load_missing", [r"0\.self_attn\.q"]
    )
    assert isinstance(AutoModelForCausalLM.from_pretrained(saved).get_parameter(name), nn.Parameter)


def test_a_head_that_the_quantized_model_had_not(saved):
    """Of another class than the checkpoint's: drawn at random by transformers, as ever."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved, num_labels=3)
    assert model.score.weight.shape == (3, 48)


def test_an_expert_that_is_stored_unquantized(saved):
    name = "model.layers.0.mlp.experts.3.up_proj.weight"

    def unquantize(tensors):
        for suffix in ("_packed", "_absmax"):
            tensors.pop(name + suffix)
        tensors[name] = torch.zeros(24, 48)

    edit_weights(saved, unquantize)
    with pytest.raises(ValueError, match=f"not whole: it has 4 experts.*{name} is stored unquantized"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_a_state_dict_is_no_kbit_checkpoint(saved):
    config = transformers.AutoConfig.from_pretrained(saved)
    with pytest.raises(ValueError, match="folder of safetensors"):
        transformers.Qwen3MoeForCausalLM.from_pretrained(None, config=config, state_dict={})


def test_an_unquantized_config_field_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"]["rotation"] = "hadamard"
    (saved / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"unknown keys \['rotation'\]"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_layers_of_another_kind_stay_and_cannot_be_loaded_quantized(saved, monkeypatch):
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    class OtherLinear(nn.Linear):
        pass

    original = modeling_qwen3_moe.Qwen3MoeAttention.__init__

    def replaced(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.q_proj = OtherLinear(48, 32, bias=False)

    monkeypatch.setattr(modeling_qwen3_moe.Qwen3MoeAttention, "__init__", replaced)
    with pytest.raises(ValueError, match=r"OtherLinear is not nn.Linear.*modules_to_not_convert"):
        AutoModelForCausalLM.from_pretrained(saved)


def test_widths_of_what_stays_unquantized_may_differ(monkeypatch):
    """A linear layer that transformers fuses from three has no quantized counterpart, whatever their bits."""
    config = transformers.Phi3Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    with torch.device("meta"):
        model = transformers.Phi3ForCausalLM(config)
    parts = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    fuse = WeightConverter(parts, "self_attn.qkv_proj.weight", [Concatenate(dim=0)])
    monkeypatch.setattr(names, "get_model_conversion_mapping", lambda model, **kwargs: [fuse])
    index = {f"model.layers.0.{part}": TensorInfo(None, torch.float32, (32, 32), 0) for part in parts}
    assert build_plan(model, kbit.KbitConfig(overrides={"q_proj": 5}), index, pre_quantized=False) == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"codebook": [-1 + 2 * i / 15 for i in range(16)]}, "another codebook of 4 bits than the model's"),
        ({"absmax_format": "float32"}, "block scales in float32, not e4m4 as the model's"),
    ],
)
def test_layers_that_the_config_would_decode_otherwise_are_not_saved(saved, tmp_path, options, message):
    model = AutoModelForCausalLM.from_pretrained(saved)
    attention = model.model.layers[0].self_attn
    linear = nn.Linear(attention.q_proj.in_features, attention.q_proj.out_features, bias=False)
    attention.q_proj = kbit.nn.KbitLinear.from_linear(linear, bits=4, **options)
    with pytest.raises(ValueError, match=f"self_attn.q_proj has {message}"):
        model.save_pretrained(tmp_path / "other")
    attention.q_proj = linear
    model.save_pretrained(tmp_path / "plain")
