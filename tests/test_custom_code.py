"""What models do around loading: code of their own writes to weights, configs and biases are others'."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    ChineseCLIPTextConfig,
    ChineseCLIPTextModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import kbit
import tiny_models
from kbit.integrations.nvfp4 import NVFP4Config


class OwnConfig(PreTrainedConfig):
    model_type = "own_code"


class OwnModel(PreTrainedModel):
    """As models outside transformers are written: numbers are drawn in place, whatever was loaded."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(40, 64, padding_idx=0)
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.data.zero_()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()

    def forward(self, ids):
        return self.down(torch.relu(self.up(self.embed(ids))))


IDS = torch.arange(40)
CONFIG = {"bits": 4}
SIZES = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 96}


@pytest.fixture
def model():
    made = OwnModel(OwnConfig())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def test_code_of_its_own_draws_nothing_that_was_loaded(model, tmp_path):
    model.save_pretrained(tmp_path / "plain")
    on_load = OwnModel.from_pretrained(tmp_path / "plain", quantization_config=kbit.KbitConfig(**CONFIG))
    in_place = kbit.quantize_model(model, kbit.KbitConfig(**CONFIG))
    in_place.save_pretrained(tmp_path / "quantized")
    loaded = OwnModel.from_pretrained(tmp_path / "quantized")
    want = in_place(IDS)
    for one in (on_load, loaded):
        assert torch.equal(one(IDS), want)
        assert {type(module) for module in (one.embed, one.up)} == {kbit.nn.KbitEmbedding, kbit.nn.KbitLinear}
        assert one.up.weight is one.up.weight_packed
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(OwnModel.from_pretrained(tmp_path / "again")(IDS), want)


@pytest.mark.parametrize("quantized", [False, True])
def test_what_files_lack_is_drawn(model, quantized, tmp_path):
    """A bias: by the model's code, which may write to the weight beside it, too."""
    model.up.bias = None
    how = {} if quantized else {"quantization_config": kbit.KbitConfig(**CONFIG)}
    source = kbit.quantize_model(model, kbit.KbitConfig(**CONFIG)) if quantized else model
    source.save_pretrained(tmp_path)
    loaded = OwnModel.from_pretrained(tmp_path, **how)
    assert not loaded.up.bias.any()
    assert torch.equal(loaded.down.bias, model.down.bias)
    decoded = model.up.dequantize() if quantized else model.up.weight
    assert (loaded.up.dequantize() - decoded).abs().max() < (1e-6 if quantized else 0.5)


def test_the_row_of_padding_keeps_its_codes(tmp_path):
    """transformers draws zeros there, through the module that holds the embedding."""
    model = ChineseCLIPTextModel(ChineseCLIPTextConfig(**SIZES, vocab_size=99))
    nn.init.normal_(model.get_input_embeddings().weight)
    kbit.quantize_model(model, kbit.KbitConfig(bits=4, embedding_bits=4)).save_pretrained(tmp_path)
    loaded = ChineseCLIPTextModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_input_embeddings()(IDS), model.get_input_embeddings()(IDS))


def test_a_head_of_another_size_is_drawn_and_stays_unquantized(tmp_path):
    config = ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=2)
    ViTForImageClassification(config).save_pretrained(tmp_path)
    how = {"quantization_config": kbit.KbitConfig(bits=4), "num_labels": 5, "ignore_mismatched_sizes": True}
    model = AutoModelForImageClassification.from_pretrained(tmp_path, **how)
    assert type(model.classifier) is nn.Linear
    assert model.classifier.weight.std() > 0
    assert any(isinstance(module, kbit.nn.KbitLinear) for module in model.modules())


@pytest.mark.parametrize("config", [kbit.KbitConfig(bits=4), NVFP4Config()], ids=["kbit", "NVFP4"])
def test_a_model_of_a_quantized_ones_config_is_saved_without_it(config, tmp_path):
    tiny_models.build("llama", torch.float32).save_pretrained(tmp_path / "plain")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config)
    quantized.save_pretrained(tmp_path / "kbit")
    AutoModelForCausalLM.from_pretrained(tmp_path / "kbit").save_pretrained(tmp_path / "twice")
    AutoModelForCausalLM.from_pretrained(tmp_path / "twice")  # a quantized one still says it
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "kbit"))
    model.save_pretrained(tmp_path / "again")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert model.config.quantization_config["quant_method"] == config.quant_method


def test_a_model_that_is_made_in_inference_mode_runs(tmp_path, tiles_pay):
    """Its biases are tensors whose data cannot be replaced, so layers are not merged."""
    sizes = {"vocab_size": 60, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    ids = torch.ones(1, 4, dtype=torch.long)
    with torch.inference_mode():
        made = Qwen2ForCausalLM(config).to(torch.bfloat16).eval()
        made.save_pretrained(tmp_path)
        wanted = kbit.quantize_model(made, kbit.KbitConfig(bits=4))(ids).logits
        assert made.model.layers[0].self_attn.q_proj.bias.is_inference()
    options = {"quantization_config": kbit.KbitConfig(bits=4), "dtype": torch.bfloat16}
    loaded = Qwen2ForCausalLM.from_pretrained(tmp_path, **options)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, wanted)
