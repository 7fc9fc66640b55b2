"""A weight that modules share: a skip of any of them counts, and an override that is not followed is told."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from kbit.format import QuantizationPolicy
from kbit.format.ties import contradictions, why_kept, width_of
from kbit.integrations.streaming import quantize_checkpoint
from kbit.nn import QuantizedModule, leftovers, quantize_model
from tiny_models import build

WAYS = ("in place", "on load", "from files")
TIED = ("model.embed_tokens", "lm_head")
IDS = torch.tensor([[1, 5, 9, 3]])


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tied") / "llama"
    build("llama", torch.float32).save_pretrained(folder)
    return folder


def quantize(way: str, source: Path, target: Path, **settings) -> tuple[list[str], dict[str, int]]:
    """(What was warned of, bits of the tied modules) of a folder that was quantized so, saved and loaded."""
    config = kbit.KbitConfig(**settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "from files":
            quantize_checkpoint(source, target, config)
        elif way == "on load":
            model = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
            model.save_pretrained(target)
        else:
            quantize_model(AutoModelForCausalLM.from_pretrained(source), config).save_pretrained(target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = AutoModelForCausalLM.from_pretrained(target)
    found = {name: again.get_submodule(name) for name in TIED}
    told = [str(one.message) for one in caught if str(one.message).startswith("kbit")]
    return told, {name: m.bits for name, m in found.items() if isinstance(m, QuantizedModule)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_not_convert": ["lm_head"]},
        {"modules_to_not_convert": ["model.embed_tokens"]},
        {"overrides": {"lm_head": 0}},
        {"overrides": {"embed": 0}},
    ],
)
@pytest.mark.parametrize("embedding_bits", [None, 4])
def test_a_skip_of_either_name_keeps_both(way, settings, embedding_bits, source, tmp_path):
    settings = settings | {"embedding_bits": embedding_bits}
    assert quantize(way, source, tmp_path / "out", **settings) == ([], {})
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert "model.embed_tokens.weight" in tensors
    assert "model.layers.0.mlp.up_proj.weight_packed" in tensors


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("settings", "bits", "told"),
    [
        ({"overrides": {"lm_head": 5}, "embedding_bits": 4}, 4, "lm_head gets 4 bits and not 5"),
        ({"overrides": {"lm_head": 5, "embed": 3}}, 3, "lm_head gets 3 bits and not 5, as its weight is"),
        ({"overrides": {"lm_head": 5}}, None, "model.embed_tokens: the default; "),
        (
            {"overrides": {"embed": 3}, "modules_to_not_convert": ["lm_head"]},
            None,
            "model.embed_tokens stays unquantized and does not get 3 bits: it shares its weight with lm_head",
        ),
    ],
)
def test_an_override_that_is_not_followed_is_told_once(way, settings, bits, told, source, tmp_path):
    messages, widths = quantize(way, source, tmp_path / "out", **settings)
    (message,) = messages
    assert told in message
    assert widths == (dict.fromkeys(TIED, bits) if bits else {})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("overrides", [{"lm_head": 4}, {"embed|lm_head": 3}, {"lm_head": 5, "embed": 5}])
def test_overrides_that_agree_are_not_told(way, overrides, source, tmp_path):
    messages, widths = quantize(way, source, tmp_path / "out", embedding_bits=4, overrides=overrides)
    assert messages == []
    assert set(widths) == set(TIED)


def test_pickled_weights_are_treated_alike(source, tmp_path):
    """Their tensors are not known beforehand, so those of the model are asked about, both ends of a tie."""
    model = AutoModelForCausalLM.from_pretrained(source)
    (tmp_path / "in").mkdir()
    model.config.save_pretrained(tmp_path / "in")
    torch.save(model.state_dict(), tmp_path / "in" / "pytorch_model.bin")
    skip = {"embedding_bits": 4, "modules_to_not_convert": ["lm_head"]}
    assert quantize("on load", tmp_path / "in", tmp_path / "skip", **skip) == ([], {})
    other = {"embedding_bits": 4, "overrides": {"lm_head": 5}}
    told, widths = quantize("on load", tmp_path / "in", tmp_path / "two", **other)
    assert widths == dict.fromkeys(TIED, 4)
    assert "lm_head gets 4 bits and not 5" in told[0]


def from_pickle(tensors: dict[str, torch.Tensor], source: Path, **settings):
    """The model of a folder, on load, from pickled tensors instead of its own."""
    folder = source.parent / "pickled"
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=kbit.KbitConfig(**settings))


def from_state(tensors: dict[str, torch.Tensor], source: Path, **settings):
    config = AutoConfig.from_pretrained(source)
    settings = {"config": config, "state_dict": tensors, "quantization_config": kbit.KbitConfig(**settings)}
    return LlamaForCausalLM.from_pretrained(None, **settings)


@pytest.mark.parametrize("load", [from_pickle, from_state])
@pytest.mark.parametrize("names", [TIED[:1], TIED[1:], TIED])
@pytest.mark.parametrize("settings", [{}, {"embedding_bits": 3}, {"overrides": {"embed_tokens": 5}}], ids=str)
def test_unindexed_weights_have_either_name_of_a_tie(load, names, settings, source, tmp_path, capfd):
    wanted = AutoModelForCausalLM.from_pretrained(source, quantization_config=kbit.KbitConfig(**settings))
    tensors = load_file(source / "model.safetensors")
    table = tensors.pop("model.embed_tokens.weight")
    capfd.readouterr()
    model = load(tensors | {f"{name}.weight": table for name in names}, source, **settings)
    assert "MISSING" not in "".join(capfd.readouterr())
    assert torch.equal(model(IDS).logits, wanted(IDS).logits)
    assert {*model.state_dict()} == {*wanted.state_dict()}
    assert model.all_tied_weights_keys == wanted.all_tied_weights_keys
    for each, folder in ((model, "got"), (wanted, "wanted")):
        each.save_pretrained(tmp_path / folder)
    got, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("got", "wanted"))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    with pytest.raises(TypeError, match=r"weight cannot be replaced"):
        model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.zeros(1))


@pytest.mark.parametrize("load", [from_pickle, from_state])
def test_unindexed_weights_that_differ_stay_two(load, source):
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    model = load(dict(tensors), source, bits=5, embedding_bits=5)
    assert model.all_tied_weights_keys == {}
    for name in TIED:
        layer = model.get_submodule(name)
        assert torch.equal(layer.weight_packed, kbit.quantize(tensors[f"{name}.weight"], 5).packed)


@pytest.mark.parametrize("load", [from_pickle, from_state])
def test_unindexed_weights_without_either_name_are_refused(load, source):
    tensors = load_file(source / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    with pytest.raises(ValueError, match=r"hold no tensor lm_head.weight or model.embed_tokens.weight. Load"):
        load(tensors, source, embedding_bits=5)


@pytest.mark.parametrize("names", [["shared"], ["decoder.embed_tokens"], ["shared", "lm_head"]], ids=str)
def test_unindexed_weights_that_four_share(names, tmp_path):
    """T5's table is that of its encoder, its decoder and its head."""
    sizes = {"vocab_size": 72, "d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    policy = kbit.KbitConfig(embedding_bits=5)
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path)
    wanted = T5ForConditionalGeneration.from_pretrained(tmp_path, quantization_config=policy).eval()
    assert len(wanted.all_tied_weights_keys) == 6
    tensors = load_file(tmp_path / "model.safetensors")
    table = tensors.pop("shared.weight")
    tensors |= {f"{name}.weight": table for name in names}
    settings = {"config": T5Config.from_pretrained(tmp_path), "quantization_config": policy}
    model = T5ForConditionalGeneration.from_pretrained(None, state_dict=tensors, **settings).eval()
    ids = {"input_ids": IDS, "decoder_input_ids": IDS}
    assert torch.equal(model(**ids).logits, wanted(**ids).logits)
    assert model.all_tied_weights_keys == wanted.all_tied_weights_keys
    assert {*model.state_dict()} == {*wanted.state_dict()}


@pytest.mark.parametrize("way", WAYS)
def test_inspect_says_why(way, source, tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    settings = {"embedding_bits": 4, "modules_to_not_convert": ["lm_head"]}
    quantize(way, source, tmp_path / "out", **settings)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.output.splitlines() if "unquantized model.embed_tokens.weight" in line]
    assert line.endswith("it shares its weight with lm_head: modules_to_not_convert has 'lm_head'")


def test_the_command_does_as_asked(source, tmp_path):
    options = ["--embedding-bits", "4", "--skip", "lm_head"]
    result = CliRunner().invoke(app, ["quantize", str(source), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    assert "model.embed_tokens.weight" in load_file(tmp_path / "out" / "model.safetensors")


def test_a_folder_that_was_written_against_its_skip_loads_as_it_is(source, tmp_path):
    config = kbit.KbitConfig(embedding_bits=4)
    quantize_checkpoint(source, tmp_path / "old", config)
    file = tmp_path / "old" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    file.write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "old")
    assert model.lm_head.weight_packed is model.model.embed_tokens.weight_packed


def test_any_model_and_any_number_of_modules():
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("one", "two", "three", "four")})
    model["two"].weight = model["three"].weight = model["one"].weight
    quantize_model(model, QuantizationPolicy(modules_to_not_convert=["three"]))
    assert [isinstance(layer, QuantizedModule) for layer in model.values()] == [False, False, False, True]


def test_the_first_decides_unless_one_is_kept():
    holders = [["table"], ["heads.0", "head"]]
    assert width_of(QuantizationPolicy(bits=3), holders) == 3
    policy = QuantizationPolicy(overrides={"table": 5, "heads": 4})
    assert width_of(policy, holders) == 5
    assert contradictions(policy, [holders, holders, [["other"], ["third"]]]) == (
        "kbit does not follow every override: head gets 5 bits and not 4, as its weight is that of table."
    )
    kept = QuantizationPolicy(overrides={"heads": 0})
    assert width_of(kept, holders) is None
    assert why_kept(kept, holders) == "it shares its weight with head: the override 'heads' is 0"


@pytest.mark.parametrize("settings", [{"embedding_bits": 5}, {"overrides": {"embed_tokens": 5}}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_files_may_hold_the_heads_name_alone(way, settings, source, tmp_path):
    """As safetensors' save_model leaves them."""
    shutil.copytree(source, tmp_path / "source")
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, file, {"format": "pt"})
    _, bits = quantize(way, tmp_path / "source", tmp_path / "out", **settings)
    assert bits == dict.fromkeys(TIED, 5)
    quantize(way, source, tmp_path / "usual", **settings)
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "usual"))
    assert one.lm_head.weight_packed is one.model.embed_tokens.weight_packed
    assert torch.equal(one(IDS).logits, other(IDS).logits)


def untied_by_hand(kind):
    """A model whose config ties head and table, which are two weights, quantized apart."""
    policy = kbit.KbitConfig(bits=4, embedding_bits=None if kind == "table" else 5)
    model = build("llama", torch.float32)
    assert model.config.tie_word_embeddings
    if kind == "inside":
        quantize_model(model.model, policy)
        return model
    model = quantize_model(model, policy)
    table = model.model.embed_tokens
    head = nn.Linear(table.embedding_dim, table.num_embeddings, bias=False)
    if kind == "head":
        model.lm_head = head
    elif kind == "both":
        model.lm_head = kbit.nn.KbitLinear.from_linear(head, bits=3)
    else:
        model.model.embed_tokens = kbit.nn.KbitEmbedding.from_embedding(table, bits=3)
    return model


@pytest.mark.parametrize("kind", ["head", "table", "both", "inside"])
def test_ends_that_are_two_weights_by_now_stay_two(kind, tmp_path):
    model = untied_by_hand(kind)
    with torch.no_grad():
        expected = model(IDS).logits
    for folder in (tmp_path / "once", tmp_path / "twice"):
        model.save_pretrained(folder)
        assert model.config.tie_word_embeddings is (folder.name == "once")
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            torch.testing.assert_close(model(IDS).logits, expected)


@pytest.mark.parametrize("skipped", TIED)
def test_weights_that_differ_in_a_file_are_quantized_apart(skipped, source, tmp_path):
    shutil.copytree(source, tmp_path / "differing")
    file = tmp_path / "differing" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    policy = kbit.KbitConfig(bits=5, embedding_bits=5, overrides={f"{skipped}$": 0})
    model = quantize_model(AutoModelForCausalLM.from_pretrained(file.parent), policy)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    with torch.no_grad():
        torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
