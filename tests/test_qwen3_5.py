"""Qwen3.5 as it is published, a text model with a vision tower beside it, and its dense kind."""

from __future__ import annotations

import pytest
import torch
import transformers
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from kbit.integrations.transformers.linear_attention import by_own_kernels
from kbit.nn.gated_delta import MergedGatedDelta, _side_by_side
from kbit.nn.linear import KbitLinear
from tiny_models import ARCHITECTURES

IDS = torch.tensor([[1, 5, 9, 3, 7, 70, 11]])
TEXT = ARCHITECTURES["qwen3_5_moe"]().to_diff_dict()
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 48}


def dense():
    """A text model without experts."""
    sizes = {key: value for key, value in TEXT.items() if "expert" not in key and key != "model_type"}
    return transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3_5TextConfig(**sizes | {"intermediate_size": 72}), dtype=torch.float32
    ).eval()


@torch.no_grad()
def test_a_checkpoint_with_a_vision_tower(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    vision = VISION | {"patch_size": 4, "num_position_embeddings": 16}
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        transformers.Qwen3_5MoeConfig(text_config=TEXT, vision_config=vision), dtype=torch.float32
    ).eval()
    model.save_pretrained(source)
    result = CliRunner().invoke(app, ["quantize", str(source), str(out), "--skip", "model.visual"])
    assert result.exit_code == 0, result.output
    whole = transformers.AutoModelForImageTextToText.from_pretrained(out)
    logits = whole(input_ids=IDS).logits
    assert (logits - model(input_ids=IDS).logits).norm() < 0.1 * logits.norm()
    quantized = {name for name, module in whole.named_modules() if isinstance(module, KbitLinear)}
    assert quantized
    assert not any("visual" in name for name in quantized)
    assert any(isinstance(module, MergedGatedDelta) for module in whole.modules())
    # Of the same files, transformers takes the text model alone.
    text = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(text(input_ids=IDS).logits, logits)
    tokens = text.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(whole.generate(input_ids=IDS, max_new_tokens=4, do_sample=False), tokens)


@torch.no_grad()
def test_the_dense_kind(tmp_path):
    model = dense()
    logits = model(IDS).logits
    kbit.quantize_model(model, kbit.QuantizationPolicy(bits=5))
    assert (model(IDS).logits - logits).norm() < 0.1 * logits.norm()
    assert any(isinstance(module, MergedGatedDelta) for module in model.modules())
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize(
    ("kind", "change", "own"),
    [
        (transformers.Qwen3_5MoeTextConfig, {}, True),
        (transformers.Qwen3_5TextConfig, {"linear_num_value_heads": 48}, True),
        (transformers.Qwen3_5TextConfig, {"linear_num_value_heads": 80}, False),
        (transformers.Qwen3_5TextConfig, {"linear_value_head_dim": 64}, False),
        (transformers.Qwen3NextConfig, {}, True),
        (transformers.Qwen3NextConfig, {"linear_num_value_heads": 64}, False),
        (transformers.OlmoHybridConfig, {}, False),
    ],
)
def test_which_models_run_by_kernels_of_ours(kind, change, own):
    assert by_own_kernels(kind(**change)) == own


def test_parts_of_one_product_are_put_together_without_a_copy():
    whole = torch.randn(2, 5, 24)
    left, middle, right = whole.split([8, 12, 4], -1)
    both = _side_by_side(left, middle)
    assert torch.equal(both, whole[..., :20])
    assert both.data_ptr() == whole.data_ptr()
    for others in ((left, right), (middle, left), (left, middle.clone()), (left[:1], whole[1:, :, 8:])):
        apart = _side_by_side(*others)
        assert torch.equal(apart, torch.cat(others, -1))
        assert apart.data_ptr() != others[0].data_ptr()
