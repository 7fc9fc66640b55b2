"""A table and a head that a config ties, of which the files hold both: two weights if they differ."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from kbit.format.safetensors_header import read_header
from kbit.integrations.streaming import quantize_checkpoint, reader
from kbit.integrations.transformers import stored_ties
from kbit.nn import KbitEmbedding, KbitLinear, QuantizedModule, quantize_model
from tiny_models import build

IDS = torch.tensor([[1, 5, 9, 3]])
WAYS = ("in place", "on load", "from files")
T5 = {"vocab_size": 72, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
CLASSES = {"llama": LlamaForCausalLM, "t5": T5ForConditionalGeneration}
TABLES = {"llama": "model.embed_tokens", "t5": "shared"}


def head_of(kind, table):
    if kind == "equal":
        return table.clone()
    head = torch.randn_like(table)
    if kind == "at its end":
        head = table.clone()
        head[-1, -1] += 1
    return head


def build_t5():
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(**T5)).eval()


def save_with_head(architecture, folder, kind="of its own"):
    """Save a model whose files hold a head, too; in T5's those of its encoder as well, which is the table."""
    model = build("llama", torch.float32) if architecture == "llama" else build_t5()
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    table = tensors[f"{TABLES[architecture]}.weight"]
    tensors["lm_head.weight"] = head_of(kind, table)
    if architecture == "t5":
        tensors["encoder.embed_tokens.weight"] = table.clone()
    save_file(tensors, file, {"format": "pt"})
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders whose files hold a head of its own, and in T5's what is tied to the table once more."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: save_with_head(name, folder / name) for name in CLASSES}


def load(architecture, folder, config=None):
    settings = {} if config is None else {"quantization_config": config}
    return CLASSES[architecture].from_pretrained(folder, **settings).eval()


def quantized(way, architecture, source, target, config):
    """A model quantized so, and saved to a folder."""
    if way == "from files":
        quantize_checkpoint(source, target, config)
        return load(architecture, target)
    model = load(architecture, source, config if way == "on load" else None)
    if way == "in place":
        quantize_model(model, config)
    model.save_pretrained(target)
    return model


def logits(model):
    more = {"decoder_input_ids": IDS} if isinstance(model, T5ForConditionalGeneration) else {}
    with torch.no_grad():
        return model(IDS, **more).logits


def bits_of(layer):
    return layer.bits if isinstance(layer, QuantizedModule) else None


def weight_of(layer):
    return layer.dequantize() if isinstance(layer, QuantizedModule) else layer.weight


def wanted(weight, bits):
    return weight if bits is None else kbit.dequantize(kbit.quantize(weight, bits))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", CLASSES)
@pytest.mark.parametrize(
    ("settings", "table_bits", "head_bits"),
    [
        ({}, None, None),
        ({"overrides": {"TABLE": 5}}, 5, None),
        ({"overrides": {"lm_head": 5}}, None, 5),
        ({"overrides": {"lm_head": 3, "TABLE": 5}}, 5, 3),
        ({"embedding_bits": 5}, 5, 5),
        ({"embedding_bits": 5, "modules_to_not_convert": ["lm_head"]}, 5, None),
        ({"embedding_bits": 5, "overrides": {"TABLE": 0}}, None, 5),
    ],
    ids=str,
)
def test_a_head_of_its_own_is_kept(way, architecture, settings, table_bits, head_bits, sources, tmp_path):
    table = TABLES[architecture]
    overrides = settings.get("overrides", {})
    overrides = {name.replace("TABLE", f"^{table}$"): bits for name, bits in overrides.items()}
    config = kbit.KbitConfig(bits=4, **settings | {"overrides": overrides})
    model = quantized(way, architecture, sources[architecture], tmp_path / "out", config)
    stored = load_file(sources[architecture] / "model.safetensors")
    for name, bits in ((table, table_bits), ("lm_head", head_bits)):
        layer = model.get_submodule(name)
        assert bits_of(layer) == bits
        assert torch.equal(weight_of(layer), wanted(stored[f"{name}.weight"], bits))
    if architecture == "t5":
        assert torch.equal(weight_of(model.encoder.embed_tokens), weight_of(model.shared))
    again = load(architecture, tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load(architecture, tmp_path / "again")), logits(model))


@pytest.mark.parametrize("architecture", CLASSES)
def test_the_command_keeps_it(architecture, sources, tmp_path):
    table = TABLES[architecture]
    options = ["--override", f"^{table}$=5"]
    result = CliRunner().invoke(
        app, ["quantize", str(sources[architecture]), str(tmp_path / "out"), *options]
    )
    assert result.exit_code == 0, result.output
    model = load(architecture, tmp_path / "out")
    stored = load_file(sources[architecture] / "model.safetensors")
    assert torch.equal(model.lm_head.weight, stored["lm_head.weight"])
    assert model.get_submodule(table).bits == 5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("architecture", CLASSES)
def test_one_weight_that_is_there_twice_stays_one(way, architecture, tmp_path):
    source, table = save_with_head(architecture, tmp_path / "in", "equal"), TABLES[architecture]
    config = kbit.KbitConfig(bits=4, overrides={f"^{table}$": 5})
    model = quantized(way, architecture, source, tmp_path / "out", config)
    for each in (model, load(architecture, tmp_path / "out")):
        assert each.lm_head.bits == 5
        assert each.lm_head.weight_packed is each.get_submodule(table).weight_packed
        assert torch.equal(logits(each), logits(model))
    codes = load_file(tmp_path / "out" / "model.safetensors")
    assert ("lm_head.weight_packed" in codes) == (way == "from files")
    assert "lm_head.weight" not in codes


def test_one_weight_is_not_quantized_for_its_head_alone(tmp_path):
    source = save_with_head("llama", tmp_path / "in", "equal")
    with pytest.raises(ValueError, match=r"lm_head \(5 bits\) and model.embed_tokens .* are tied"):
        load("llama", source, kbit.KbitConfig(bits=4, overrides={"lm_head": 5}))


def test_a_difference_anywhere_counts(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_COMPARED", 4096)
    source = save_with_head("llama", tmp_path / "in", "at its end")
    model = load("llama", source, kbit.KbitConfig(overrides={"embed_tokens": 5}))
    assert type(model.lm_head) is nn.Linear
    assert torch.equal(model.lm_head.weight, load_file(source / "model.safetensors")["lm_head.weight"])


def test_tensors_are_compared_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_COMPARED", 64)
    one = torch.arange(50, dtype=torch.float32).reshape(5, 10)
    others = {name: one.clone() for name in ("same", "last", "first")}
    others |= {"half": one.half(), "flat": one.reshape(50).clone()}
    others["last"][-1, -1] = 0
    others["first"][0, 0] = 1
    save_file({"one": one, **others}, tmp_path / "some.safetensors")
    index, pieces = read_header(tmp_path / "some.safetensors"), []
    read = reader.read_tensor
    monkeypatch.setattr(reader, "read_tensor", lambda name, *rest: pieces.append(name) or read(name, *rest))
    counts = {}
    for name in others:
        pieces.clear()
        assert reader.are_equal(("one", index["one"]), (name, index[name])) == (name == "same")
        counts[name] = len(pieces)
    assert counts == {"same": 8, "last": 8, "first": 2, "half": 0, "flat": 0}


def test_nothing_is_compared_where_neither_is_to_be_quantized(sources, monkeypatch):
    monkeypatch.setattr(stored_ties, "are_equal", lambda *ends: pytest.fail("compared"))
    model = load("t5", sources["t5"], kbit.KbitConfig(bits=4))
    assert model.lm_head.weight is not model.shared.weight


@pytest.mark.parametrize("head", [None, 3, 5])
@pytest.mark.parametrize("table", [None, 5])
def test_a_new_head_of_t5_is_loaded_again(head, table, tmp_path):
    """Its config ties head and table, whatever a file of it says."""
    model = quantize_model(build_t5(), kbit.KbitConfig(bits=4, embedding_bits=table))
    plain = nn.Linear(64, 72, bias=False)
    model.set_output_embeddings(plain if head is None else KbitLinear.from_linear(plain, bits=head))
    expected = logits(model)
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        model = load("t5", folder)
        assert model.config.tie_word_embeddings
        assert (bits_of(model.lm_head), bits_of(model.shared)) == (head, table)
        assert torch.equal(logits(model), expected)


def test_a_new_table_of_t5_is_loaded_again(tmp_path):
    model = quantize_model(build_t5(), kbit.KbitConfig(bits=4, embedding_bits=5))
    model.set_input_embeddings(KbitEmbedding.from_embedding(nn.Embedding(72, 64), bits=3))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load("t5", tmp_path)), logits(model))
