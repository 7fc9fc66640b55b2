"""NVFP4 models of transformers: what stays in 16 bits is said, other methods refused, settings changed."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import kbit
from kbit.integrations.nvfp4 import NVFP4Config, quantizer
from kbit.integrations.transformers import inplace
from kbit.nn import fused_experts, leftovers
from kbit.nvfp4.layers import NVFP4Linear, NVFP4Module
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    build("qwen3_moe", torch.bfloat16, spread=False).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def quantized(source: Path, **settings: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(source, quantization_config=NVFP4Config(**settings))


def test_large_parameters_that_stay_are_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantizer.logger, "propagate", True)
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    caplog.set_level(logging.WARNING)
    model = quantized(source, modules_to_not_convert=["model.layers.1.mlp"])
    model.save_pretrained(tmp_path / "saved")
    messages = [caplog.text]
    caplog.clear()
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    messages.append(caplog.text)
    for message in messages:
        assert "kbit left 5 large parameters unquantized: model.embed_tokens.weight (" in message
        assert "MB: embeddings stay as they are)" in message
        assert "model.layers.*.mlp.down_proj.weight (0.0 MB: modules_to_not_convert has" in message
        assert "lm_head.weight (0.0 MB: it is the output head)" in message


def test_experts_of_another_layout_are_reported_with_the_reason(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quantizer.logger, "propagate", True)
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    monkeypatch.setitem(fused_experts._LAYOUT, "has_bias", True)
    caplog.set_level(logging.WARNING)
    quantized(source)
    assert "mlp.experts.gate_up_proj (0.0 MB: its experts have has_bias=False)" in caplog.text


def test_a_model_cannot_have_two_methods(source: Path) -> None:
    model = quantized(source)
    layers = dict(model.named_modules())
    with pytest.raises(ValueError, match="quantized already, by NVFP4Config.*Quantize the unquantized model"):
        kbit.quantize_model(model, kbit.KbitConfig(bits=4, embedding_bits=4))
    assert dict(model.named_modules()) == layers
    assert isinstance(model.config.quantization_config, NVFP4Config)


def test_what_cannot_be_dequantized_is_not_passed_over(source: Path) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.\w+ is a NVFP4Linear, not a k-bit layer"):
        kbit.dequantize_model(quantized(source))
    # What has layers of both kinds keeps those of the other.
    settings = NVFP4Config().settings()
    linear = torch.nn.Linear(32, 32)
    both = torch.nn.Sequential(NVFP4Linear.from_linear(linear, settings), linear)
    kbit.quantize_model(both, kbit.KbitConfig())
    kbit.dequantize_model(both)
    assert [type(module) for module in both] == [NVFP4Linear, torch.nn.Linear]


def test_a_folder_can_be_loaded_with_other_settings(source: Path, tmp_path: Path) -> None:
    model = quantized(source)
    model.save_pretrained(tmp_path / "saved")
    config = AutoConfig.from_pretrained(tmp_path / "saved")
    config.quantization_config["activations"] = "16bit"
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", config=config)
    assert {m.settings.activations for m in other.modules() if isinstance(m, NVFP4Module)} == {"16bit"}
    expected = quantized(source, activations="16bit")
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, expected(IDS).logits)


def test_models_that_are_split_over_ranks_are_refused():
    model = build("llama", torch.bfloat16, spread=False)
    model.config.distributed_config = SimpleNamespace(tp_size=2)
    loads = quantizer.NVFP4HfQuantizer(NVFP4Config())
    for step in (loads._process_model_before_weight_loading, loads._process_model_after_weight_loading):
        with pytest.raises(ValueError, match="NVFP4 layers are not split over ranks"):
            step(model)
    with pytest.raises(ValueError, match="the model is split over ranks, each of which has a part"):
        kbit.quantize_model(model, kbit.KbitConfig(bits=4))
    model.config.distributed_config = SimpleNamespace(tp_size=None, fsdp_size=2)
    assert not inplace.is_planned_over_ranks(model)
