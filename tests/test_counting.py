"""`num_parameters` of quantized models is that of the models they were."""

from __future__ import annotations

import pytest
import torch

import kbit
from tiny_models import ARCHITECTURES, build

EVERY_WAY = ({}, {"exclude_embeddings": True})


def counts(model):
    return [model.num_parameters(**way) for way in EVERY_WAY]


@pytest.mark.parametrize("config", [{"bits": 3}, {"bits": 4, "embedding_bits": 5}], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_are_counted_and_not_the_words_of_codes(architecture, config):
    model = build(architecture, torch.float32)
    want, trained = counts(model), model.num_parameters(only_trainable=True)
    kbit.quantize_model(model, kbit.KbitConfig(search=False, **config))
    assert counts(model) == want
    assert 0 < model.num_parameters(only_trainable=True) < trained
    kbit.dequantize_model(model)
    assert counts(model) == want


def test_those_of_nvfp4_too(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=72, **sizes))
    model.save_pretrained(tmp_path)
    config = kbit.NVFP4Config(activations="16bit")
    assert counts(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)) == counts(model)
