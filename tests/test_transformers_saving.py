"""transformers: a model saves as what it is by then, whoever changed it, and whatever shares its config."""

import peft
import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import kbit
from tiny_models import ARCHITECTURES, build

IDS = torch.tensor([[1, 2, 3]])


def quantized(architecture="qwen3", **options):
    return kbit.quantize_model(build(architecture, torch.float32), kbit.KbitConfig(**options))


def require_same(model, folder, kind=AutoModelForCausalLM):
    """What was saved computes what the model does."""
    model.save_pretrained(folder)
    with torch.no_grad():
        have, want = (each(IDS)[0] for each in (kind.from_pretrained(folder, dtype=torch.float32), model))
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)


def test_layers_that_are_replaced_after_others_were_saved(tmp_path):
    model = quantized()
    require_same(model, tmp_path / "a")
    model.lm_head = kbit.nn.KbitLinear.from_linear(model.lm_head, bits=5)
    require_same(model, tmp_path / "b")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    mlp = loaded.model.layers[1].mlp
    mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features, bias=False)
    require_same(loaded, tmp_path / "c")


def test_parts_that_are_quantized_one_after_the_other(tmp_path):
    model = build("qwen3", torch.float32)
    kbit.quantize_model(model.model.layers[0], kbit.KbitConfig(bits=3))
    require_same(model, tmp_path / "a")
    kbit.quantize_model(model.model.layers[1], kbit.KbitConfig(bits=5))
    require_same(model, tmp_path / "b")


def test_a_model_and_the_one_inside_it_state_their_own(tmp_path):
    model = build("qwen3", torch.float32)
    kbit.quantize_model(model.model, kbit.KbitConfig(bits=3))
    require_same(model, tmp_path / "outer")
    require_same(model.model, tmp_path / "inner", transformers.AutoModel)


@pytest.mark.parametrize("embedding_bits", [None, 4])
def test_the_model_inside_is_dequantized(embedding_bits, tmp_path):
    model = quantized(embedding_bits=embedding_bits)
    kbit.dequantize_model(model.model)
    require_same(model, tmp_path)


@pytest.mark.parametrize("dequantized", [False, True])
def test_a_model_with_a_quantized_one_inside(dequantized, tmp_path):
    text = {
        key: value for key, value in ARCHITECTURES["qwen3"]().to_diff_dict().items() if key != "model_type"
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": []}
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    kbit.quantize_model(model.model.language_model, kbit.KbitConfig(bits=4))
    if dequantized:
        kbit.dequantize_model(model)
    model.save_pretrained(tmp_path)
    loaded, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-4)


def test_all_layers_are_taken_away(tmp_path):
    model = quantized()
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, module in [*part.named_children()]:
                if isinstance(module, kbit.nn.KbitLinear):
                    plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
                    setattr(part, name, plain)
    require_same(model, tmp_path)
    assert not hasattr(AutoConfig.from_pretrained(tmp_path), "quantization_config")


def test_a_config_of_the_user_stays_so(tmp_path):
    config = kbit.KbitConfig(bits=4)
    model = kbit.quantize_model(build("qwen3", torch.float32), config)
    config.bits = 2
    require_same(model, tmp_path)
    assert model.config.quantization_config is not config


def test_models_that_share_a_config(tmp_path):
    build("qwen3", torch.float32).save_pretrained(tmp_path / "plain")
    config = AutoConfig.from_pretrained(tmp_path / "plain")
    one, other = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    kbit.quantize_model(one, kbit.KbitConfig(bits=4))
    for step in ("one alone", "both", "one again"):
        if step == "both":
            kbit.quantize_model(other, kbit.KbitConfig(bits=3))
        elif step == "one again":
            other.dequantize()
        require_same(one, tmp_path / f"{step} one")
        require_same(other, tmp_path / f"{step} other")


def test_block_scales_that_were_cast(tmp_path):
    """As peft's prepare_model_for_kbit_training casts all parameters of 16 bits."""
    model = quantized(absmax_format="float16")
    for parameter in model.parameters():
        if parameter.dtype == torch.float16:
            parameter.data = parameter.data.float()
    require_same(model, tmp_path)


def test_adapters_leave_the_config_as_it_is(tmp_path, monkeypatch):
    # transformers 5.24 asks for peft 0.22, before that was out.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.21.0")
    model = quantized(overrides={"q_proj": 3})
    before = model.config.quantization_config.to_dict()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.to_dict() == before


def test_experts_are_saved_in_the_original_format_alone(tmp_path):
    model = quantized("qwen3_moe")
    with pytest.raises(ValueError, match="mlp.experts are quantized experts.*Leave out save_original_format"):
        model.save_pretrained(tmp_path, save_original_format=False)
    assert not [*tmp_path.iterdir()]
