"""Which modules are embeddings and output heads, by the names that transformers' models give them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import kbit
from docs_blocks import ROOT
from kbit.format import QuantizationPolicy
from kbit.format.checkpoint import validate_checkpoint
from kbit.format.embeddings import HEADS, OTHER_TABLES, TOKEN_TABLES, is_embedding, is_token_table
from kbit.integrations.nvfp4.config import NVFP4Config
from kbit.integrations.streaming import quantize_checkpoint
from kbit.nn import QuantizedModule, quantize_model
from tiny_models import quantize_files

# Tables of three models or more that are none of these: vectors that detectors of objects learn, and names
# that linear layers have elsewhere.
NOT_MEANT = {
    "denoising_class_embed",
    "iou_token",
    "mask_tokens",
    "no_mask_embed",
    "not_a_point_embed",
    "obj_score_token",
    "point_embed",
    "queries_embedder",
    "query",
    "reference_points",
    "weight_embedding",
}
TINY = {
    "bert": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64},
    "bloom": {"hidden_size": 64, "n_layer": 1, "n_head": 2},
    "gpt2": {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "gpt_neox": {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    },
    "t5": {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2},
}


def tiny(model_type: str, kind=AutoModel):
    torch.manual_seed(0)
    return kind.from_config(AutoConfig.for_model(model_type, vocab_size=96, **TINY[model_type])).eval()


# -- the lists -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(TOKEN_TABLES | OTHER_TABLES | HEADS))
def test_embedding_bits_is_for_each(name):
    for path in (name, f"model.decoder.{name}", f"model.{name}.3"):
        assert QuantizationPolicy(bits=4).bits_for(path) is None
        assert QuantizationPolicy(bits=4, embedding_bits=5).bits_for(path) == 5
        assert is_token_table(path) == (name in TOKEN_TABLES)
    for path in (f"{name}.dense", f"model.{name}.3.up_proj", f"x_{name}x", f"layers.{name}s2"):
        assert QuantizationPolicy(bits=4).bits_for(path) == 4
    assert (NVFP4Config().why_not(f"model.{name}") == "it is the output head") == (name in HEADS)


@pytest.mark.parametrize("name", ["score", "classifier", "qa_outputs", "pooler.dense", "mlp.shared.up_proj"])
def test_heads_of_tasks_and_other_layers_are_not_meant(name):
    assert not is_embedding(name)


def test_no_linear_layer_of_a_model_has_the_name_of_a_table(sources_of_models):
    # One of Apertus 1.5's, which so stays in 16 bits unless embedding_bits says otherwise.
    known = "self.embedding = nn.Linear(config.embed_dim, config.codebook_size, bias=False)"
    texts = [text.replace(known, "") for text in sources_of_models]
    made = {name for text in texts for name in re.findall(r"self\.(\w+) = nn\.Linear\(", text)}
    assert len(made) > 300
    assert not made & (TOKEN_TABLES | OTHER_TABLES)


def test_linear_layers_with_the_name_of_a_head_go_to_a_vocabulary(sources_of_models):
    """Or to the codes of sounds, or as far as a table has rows."""
    layer = re.compile(r"self\.(\w+) = nn\.Linear\(([^()]*(?:\([^()]*\)[^()]*)*)\)")
    made = [found for text in sources_of_models for found in layer.findall(text) if found[0] in HEADS]
    assert len(made) > 300
    onto = re.compile(r"vocab|codebook_size|num_embeddings|n_tokens_embed")
    assert not [(name, sizes) for name, sizes in made if not onto.search(sizes)]


def test_common_tables_of_models_are_listed(sources_of_models):
    made = [set(re.findall(r"self\.(\w+) = nn\.Embedding\(", text)) for text in sources_of_models]
    counts = Counter(name for names in made for name in names)
    common = {name for name, count in counts.items() if count >= 3}
    assert len(common) > 20
    assert common - TOKEN_TABLES - OTHER_TABLES == NOT_MEANT


def test_the_page_of_the_format_lists_them():
    text = (ROOT / "docs" / "format.md").read_text()
    section = text[text.index("## Embeddings and heads") :]
    listed = [re.findall(r"`(\w+)`", entry) for entry in re.findall(r"\n\* [^.]*\.", section)]
    assert [set(names) for names in listed] == [TOKEN_TABLES, OTHER_TABLES, HEADS]


# -- models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TINY)
@pytest.mark.parametrize("bits", [None, 5])
@pytest.mark.filterwarnings("ignore:kbit quantized no layer")
def test_tables_of_a_model_have_embedding_bits(model_type, bits):
    model = tiny(model_type)
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    assert tables
    quantize_model(model, QuantizationPolicy(bits=4, embedding_bits=bits))
    found = {
        name: module.bits for name, module in model.named_modules() if isinstance(module, QuantizedModule)
    }
    assert {name: found.get(name) for name in tables} == dict.fromkeys(tables, bits)
    assert {found[name] for name in found.keys() - set(tables)} <= {4}


@pytest.mark.parametrize("embedding_bits", [None, 5])
@pytest.mark.parametrize("model_type", ["bloom", "gpt_neox"])
def test_files_are_quantized_alike(model_type, embedding_bits, tmp_path):
    policy = kbit.KbitConfig(bits=4, embedding_bits=embedding_bits)
    tiny(model_type, AutoModelForCausalLM).save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "files", policy)
    in_place = quantize_model(AutoModelForCausalLM.from_pretrained(tmp_path / "in"), policy)
    in_place.save_pretrained(tmp_path / "place")
    ours, theirs = (load_file(tmp_path / way / "model.safetensors") for way in ("files", "place"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any("embed" in name and name.endswith("_packed") for name in ours) == (embedding_bits is not None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "files")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, in_place(ids).logits)


def test_a_model_that_was_cast_to_float64_says_how_to_go_on():
    model = quantize_model(nn.ModuleDict({"wte": nn.Embedding(9, 32)}), QuantizationPolicy(embedding_bits=4))
    ids = torch.arange(9)
    wanted = model.wte(ids)
    model.double()
    with pytest.raises(
        TypeError, match=r"was cast to torch.float64 \(wte\). Cast .* by model.to\(torch.float32\)\."
    ):
        model.wte(ids)
    assert torch.equal(model.to(torch.float32).wte(ids), wanted)


# -- files that were written when six names were known -------------------------------------------------------


def written_before(folder: Path, embedding_bits: int | None, stored: int = 4) -> Path:
    """Bloom, its table quantized like any other module."""
    tiny("bloom", AutoModelForCausalLM).save_pretrained(folder / "in")
    overrides = {"word_embeddings$": stored}
    quantize_files(folder / "in", folder / "old", QuantizationPolicy(bits=4, overrides=overrides))
    file = folder / "old" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= {"overrides": {}, "embedding_bits": embedding_bits}
    file.write_text(json.dumps(config))
    return folder / "old"


@pytest.mark.parametrize("embedding_bits", [None, 5])
def test_they_load_as_they_are_and_say_so_when_saved(embedding_bits, tmp_path):
    folder = written_before(tmp_path, embedding_bits)
    assert validate_checkpoint(folder).bits_for("transformer.word_embeddings") == 4
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {m.bits for m in model.modules() if isinstance(m, QuantizedModule)} == {4}
    policy = QuantizationPolicy(bits=4, overrides={"word_embeddings$": 4})
    expected = quantize_model(AutoModelForCausalLM.from_pretrained(tmp_path / "in"), policy)
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
    model.save_pretrained(tmp_path / "again")
    stated = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert QuantizationPolicy.from_dict(stated).bits_for("transformer.word_embeddings") == 4
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").transformer.word_embeddings.bits == 4


def test_other_widths_than_the_config_has_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"word_embeddings.weight_packed' .* Config and weights are of"):
        AutoModelForCausalLM.from_pretrained(written_before(tmp_path, None, stored=3))
