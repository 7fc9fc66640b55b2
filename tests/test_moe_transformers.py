"""Mixtures of experts of transformers: nothing stays 16-bit unsaid, static caches, compiled decode steps."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, StaticCache
from transformers.utils import logging as transformers_logging
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from kbit.integrations.transformers import names, report
from kbit.integrations.transformers.cache_argument import with_cache
from kbit.nn import KbitExperts, leftovers
from tiny_models import build

MIXTURES = ("qwen3_moe", "qwen3_next", "glm4_moe_lite")
IDS = torch.tensor([[1, 5, 9, 3, 7], [2, 4, 8, 70, 71]])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{architecture: folder of its 4-bit checkpoint}."""
    root = tmp_path_factory.mktemp("mixtures")
    for name in MIXTURES:
        build(name, torch.bfloat16).save_pretrained(root / name)
        config = kbit.KbitConfig(bits=4)
        model = AutoModelForCausalLM.from_pretrained(root / name, quantization_config=config)
        model.save_pretrained(root / f"{name}-k4")
    return {name: root / f"{name}-k4" for name in MIXTURES}


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs).eval()


@pytest.mark.parametrize("name", MIXTURES)
def test_all_experts_are_quantized_saved_and_reloaded(name, folders):
    model = load(folders[name])
    experts = [module for path, module in model.named_modules() if path.endswith(".experts")]
    assert experts
    assert all(type(module) is KbitExperts for module in experts)


@pytest.mark.parametrize("name", MIXTURES)
def test_generating_with_a_static_cache(name, folders):
    model = load(folders[name], dtype=torch.float32)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **settings)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **settings), expected)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_decode_step_compiles_whole(name, folders):
    model = load(folders[name], dtype=torch.float32)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="aot_eager")
    logits = []
    for forward in (model.forward, step):
        cache = StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            model(IDS[:, :3], **with_cache(cache), use_cache=True)
            for at in (3, 4):
                position = torch.full((1, 1), at)
                out = forward(IDS[:, at : at + 1], position_ids=position, **with_cache(cache))
        logits.append(out.logits[:, -1])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


# -- what stays 16-bit ---------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_said_yet():
    transformers_logging.warning_once.cache_clear()


def of_kbit(caplog):
    return [text for text in caplog.messages if text.startswith("kbit left")]


def test_the_loader_names_every_large_parameter_once(folders, caplog, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 72 * 48)
    load(folders["qwen3_moe"])
    (text,) = of_kbit(caplog)
    assert text.startswith("kbit left 2 large parameters unquantized: ")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert f"{name} (0.0 MB: the default; embedding_bits=5 quantizes it)" in text


def test_the_same_is_said_once(folders, caplog, monkeypatch):
    """Not again for what was loaded to be quantized, saved, and loaded."""
    monkeypatch.setattr(leftovers, "LARGE", 72 * 48)
    for _ in range(2):
        load(folders["qwen3_moe"])
    assert len(of_kbit(caplog)) == 1


def test_the_loader_is_silent_where_nothing_is_large(folders, caplog):
    load(folders["qwen3_next"])
    assert not of_kbit(caplog)


def test_experts_of_another_layout_are_told_with_the_reason(monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 4 * 48 * 48)
    model = build("qwen3_next", torch.float32)
    for layer in model.model.layers:
        layer.mlp.experts.is_transposed = True
    with pytest.warns(UserWarning, match="its experts have is_transposed=True"):
        kbit.quantize_model(model, kbit.KbitConfig())
    text = report.unquantized(model, kbit.KbitConfig())
    assert (
        "model.layers.*.mlp.experts.gate_up_proj (2 of 0.0 MB: its experts have is_transposed=True)" in text
    )


@pytest.mark.parametrize(
    ("name", "left_out", "reason"),
    [
        (
            "mixtral",
            {"modules_to_not_convert": ["model.layers.0.block_sparse_moe"]},
            "modules_to_not_convert has",
        ),
        ("granitemoe", {"overrides": {"input_linear": 0}}, "the override 'input_linear' is 0"),
    ],
)
def test_experts_left_out_by_their_names_in_files_are_told_so(name, left_out, reason, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    model, policy = build(name, torch.float32), kbit.KbitConfig(**left_out)
    text = report.unquantized(model, policy, names.names_in_files(model))
    assert re.search(rf"layers\.[0*]\.\w+\.experts\.gate_up_proj \([^(]*{re.escape(reason)}", text), text


def test_a_shared_parameter_is_told_once():
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(1001, 1000), "lm_head": nn.Linear(1000, 1001, False)})
    model["lm_head"].weight = model["embed_tokens"].weight
    text = report.unquantized(model, kbit.QuantizationPolicy())
    assert text.startswith("kbit left 1 large parameter unquantized: embed_tokens.weight (4.0 MB: ")


def test_inspect_counts_experts_of_a_layer_together(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 4 * 24 * 48)
    build("qwen3_next", torch.bfloat16).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert result.exit_code == 0, result.output
    for name in ("gate_proj", "up_proj", "down_proj"):
        line = f"unquantized model.layers.*.mlp.experts.*.{name}.weight: 2 x 0.0 M weights, 2 x 0.0 MB"
        assert line in result.output


def test_inspect_says_why_experts_that_are_stored_one_by_one_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 4 * 24 * 48)
    build("qwen3_next", torch.bfloat16).save_pretrained(tmp_path / "in")
    for arguments in (["quantize", "--override", "experts$=0", tmp_path / "in"], ["inspect"]):
        result = CliRunner().invoke(app, [*map(str, arguments), str(tmp_path / "out")])
        assert result.exit_code == 0, result.output
    for name in ("gate_proj", "up_proj", "down_proj"):
        parameter = re.escape(f"model.layers.*.mlp.experts.*.{name}.weight")
        line = rf"^unquantized {parameter}: .*the override 'experts\$' is 0$"
        assert re.search(line, result.output, re.M), result.output
