"""Names in a policy: a module's name in the model and that in its files decide alike, everywhere."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM
from typer.testing import CliRunner

import kbit
from kbit.cli import app
from kbit.format import QuantizationPolicy, patterns
from kbit.format.unmatched import unmatched
from kbit.integrations.streaming import quantize_checkpoint
from kbit.nn import QuantizedModule, leftovers
from tiny_models import build, quantize_files

EXPERTS = {
    "mixtral": "model.layers.{}.block_sparse_moe.experts",
    "qwen3_moe": "model.layers.{}.mlp.experts",
}
SPELLED = [
    ("mixtral", r"mlp\.experts$"),
    ("mixtral", r"block_sparse_moe\.experts$"),
    ("qwen3_moe", r"mlp\.experts$"),
]
WAYS = ("in place", "on load", "from files")


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    """{architecture: folder of an unquantized checkpoint}."""
    root = tmp_path_factory.mktemp("models")
    for name in ("llama", *EXPERTS):
        build(name, torch.float32).save_pretrained(root / name)
    return {name: root / name for name in ("llama", *EXPERTS)}


def quantize(way: str, source: Path, target: Path, **settings) -> Path:
    """A folder quantized in one of the three ways."""
    config = kbit.KbitConfig(**settings)
    if way == "from files":
        quantize_checkpoint(source, target, config)
    elif way == "on load":
        AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(target)
    else:
        kbit.quantize_model(AutoModelForCausalLM.from_pretrained(source), config).save_pretrained(target)
    return target


def stated(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def widths(folder: Path) -> dict[str, int]:
    """{module: bits} as `kbit inspect` reads them."""
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    return {module["name"]: module["bits"] for module in json.loads(result.stdout) if module["bits"]}


# -- both names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("architecture", "pattern"), SPELLED)
def test_an_override_by_either_name(architecture, pattern, way, sources, tmp_path):
    source = sources[architecture]
    folder = quantize(way, source, tmp_path / "out", bits=4, overrides={pattern: 3})
    assert widths(folder)[EXPERTS[architecture].format(0)] == 3
    assert widths(folder)["model.layers.0.self_attn.q_proj"] == 4
    # "experts$" is found in either name, so it is the reference.
    expected = quantize("on load", source, tmp_path / "expected", bits=4, overrides={r"experts$": 3})
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, expected))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.model.layers[0].mlp.experts.bits == 3
    again.save_pretrained(tmp_path / "again")
    assert stated(tmp_path / "again") == stated(folder)
    assert widths(tmp_path / "again") == widths(folder)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("skipped", ["model.layers.0.mlp", "model.layers.0.block_sparse_moe.experts"])
def test_a_skip_by_either_name(skipped, way, sources, tmp_path):
    settings = {"bits": 4, "modules_to_not_convert": [skipped]}
    folder = quantize(way, sources["mixtral"], tmp_path / "out", **settings)
    assert EXPERTS["mixtral"].format(0) not in widths(folder)
    assert widths(folder)[EXPERTS["mixtral"].format(1)] == 4
    assert not isinstance(
        AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.experts, QuantizedModule
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"modules_to_not_convert": ["model.layers.0.mlp"]},
            "modules_to_not_convert has 'model.layers.0.mlp'",
        ),
        ({"overrides": {r"mlp\.experts$": 0}}, r"the override 'mlp\\.experts$' is 0"),
    ],
)
def test_inspect_says_why_by_either_name(settings, reason, way, sources, tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    folder = quantize(way, sources["mixtral"], tmp_path / "out", bits=4, **settings)
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 0, result.output
    told = [line for line in result.output.splitlines() if "block_sparse_moe.experts.*" in line]
    assert told
    assert all(line.endswith(f"MB: {reason}") for line in told), told


def test_inspect_needs_no_model_that_transformers_knows(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, "LARGE", 1000)
    settings = {"bits": 4, "modules_to_not_convert": ["model.layers.0.mlp"]}
    folder = quantize(WAYS[0], sources["mixtral"], tmp_path / "out", **settings)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "unheard_of"}))
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 0, result.output
    assert "unquantized model.layers.0.block_sparse_moe.experts.*" in result.output


@pytest.mark.parametrize("way", WAYS)
def test_the_first_override_wins_by_whichever_name(way, sources, tmp_path):
    overrides = {r"1\.mlp\.experts": 3, "block_sparse_moe": 5, r"mlp\.experts": 2}
    folder = quantize(way, sources["mixtral"], tmp_path / "out", bits=4, overrides=overrides)
    found = widths(folder)
    assert (found[EXPERTS["mixtral"].format(0)], found[EXPERTS["mixtral"].format(1)]) == (5, 3)
    AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("way", WAYS)
def test_saving_again_keeps_the_order_of_overrides(way, sources, tmp_path):
    """transformers writes an object's keys sorted."""
    overrides = {r"layers\.0\.": 3, "down_proj": 5, "Z": 2}
    folder = quantize(way, sources["llama"], tmp_path / "out", bits=4, overrides=overrides)
    first = AutoModelForCausalLM.from_pretrained(folder)
    first.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    for model in (first, again):
        bits = [layer.mlp.down_proj.bits for layer in model.model.layers]
        assert bits == [3, 5]
        assert list(model.config.quantization_config.overrides.items()) == list(overrides.items())
    config = kbit.KbitConfig(overrides=overrides)
    assert kbit.KbitConfig.from_dict(json.loads(config.to_json_string())).overrides == overrides
    assert kbit.KbitConfig(overrides={"a": 3, "b": 2}).to_dict()["overrides"] == {"a": 3, "b": 2}


@pytest.mark.parametrize("pattern", [r"^layers\.0\..*q_proj", r"^model\.layers\.0\..*q_proj"])
def test_a_base_model_without_the_prefix_of_its_files(pattern, sources, tmp_path):
    config = kbit.KbitConfig(bits=4, overrides={pattern: 3})
    base = AutoModel.from_pretrained(sources["llama"], quantization_config=config)
    assert [base.layers[n].self_attn.q_proj.bits for n in (0, 1)] == [3, 4]
    base.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert [again.layers[n].self_attn.q_proj.bits for n in (0, 1)] == [3, 4]


def test_the_saved_config_decides_by_names_in_files_alone(sources, tmp_path):
    """What reads headers only, and versions of kbit that know of one name, must find the widths too."""
    configs = [
        stated(quantize(way, sources["mixtral"], tmp_path / way, overrides={r"mlp\.experts$": 3}))
        for way in WAYS
    ]
    assert configs[0] == configs[1] == configs[2]
    overrides = {r"^model\.layers\.\d+\.block_sparse_moe\.experts$": 3, r"mlp\.experts$": 3}
    assert list(configs[0]["overrides"].items()) == list(overrides.items())
    assert QuantizationPolicy.from_dict(configs[0]).bits_for(EXPERTS["mixtral"].format(0)) == 3


def test_a_policy_that_files_understand_is_saved_as_it_is(sources, tmp_path):
    policy = kbit.KbitConfig(overrides={r"experts$": 3}, modules_to_not_convert=["lm_head"])
    for way in WAYS:
        folder = quantize(way, sources["mixtral"], tmp_path / way, **vars(policy))
        assert stated(folder) == policy.to_dict()


def test_a_checkpoint_of_before_loads_with_the_widths_it_has(sources, tmp_path):
    """Then a name of the model was ignored in files: the config says mlp.experts, the experts have 4 bits."""
    policy = kbit.KbitConfig(bits=4, overrides={r"mlp\.experts$": 3})
    quantize_files(sources["mixtral"], tmp_path / "old", policy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "old")
    assert model.model.layers[0].mlp.experts.bits == 4


# -- what a checkpoint's config says -------------------------------------------------------------------------


def test_stating_names_layers_together_where_they_are_alike():
    policy = QuantizationPolicy(bits=4, overrides={"a": 3})
    modules = {f"m.{layer}.{name}": 4 for layer in range(3) for name in ("x", "y")}
    assert policy.stating(modules) is policy
    said = policy.stating(modules | {"m.0.x": 2, "m.1.x": 2, "m.2.x": 2, "m.1.y": 5})
    assert said.overrides == {r"^m\.\d+\.x$": 2, r"^m\.1\.y$": 5, "a": 3}
    assert policy.overrides == {"a": 3}


def test_stating_goes_before_an_override_of_the_same_text():
    policy = QuantizationPolicy(overrides={"x": 3, "^x$": 5})
    said = policy.stating({"x": 2})
    assert said.bits_for("x") == 2
    assert list(said.overrides) == ["^x$", "x"]


def test_stating_keeps_the_kind_of_policy():
    said = kbit.KbitConfig(codebook=[-1.0, 0.0, 0.5, 1.0], bits=2).stating({"lm_head": 2})
    assert type(said) is kbit.KbitConfig
    assert (
        said.to_dict()
        == kbit.KbitConfig(codebook=[-1.0, 0.0, 0.5, 1.0], bits=2, overrides={"^lm_head$": 2}).to_dict()
    )


# -- what matches nothing ------------------------------------------------------------------------------------


def told(caught: list) -> list[str]:
    return [str(one.message) for one in caught if str(one.message).startswith("kbit found no module")]


@pytest.mark.parametrize("way", WAYS)
def test_what_matches_nothing_is_told_once(way, sources, tmp_path):
    settings = {"overrides": {r"down_proj$": 5, r"q_proj$": 3}, "modules_to_not_convert": ["nope"]}
    with pytest.warns(UserWarning, match="no module") as caught:
        quantize(way, sources["mixtral"], tmp_path / "out", **settings)
    (text,) = told(caught)
    assert "override 'down_proj$' (nearest: " in text
    assert "skip 'nope'" in text
    assert "q_proj$" not in text
    assert "model.layers.*.block_sparse_moe.experts or model.layers.*.mlp.experts" in text
    assert "\n" not in text
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # the files are what they are
    assert not told(caught)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("overrides", "skipped"),
    [
        ({r"experts$": 3, r"q_proj|down_proj": 5}, ["model.layers.1", "lm_head"]),
        ({r"\.mlp\.experts": 3, "block_sparse_moe": 5, r"norm$": 0}, ["model.layers.0.block_sparse_moe"]),
        ({}, ["model.layers.0.mlp.gate", "model.norm"]),
    ],
)
def test_what_matches_something_is_not_told(overrides, skipped, way, sources, tmp_path):
    settings = {"overrides": overrides, "modules_to_not_convert": skipped}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quantize(way, sources["mixtral"], tmp_path / "out", **settings)
    assert not told(caught)


def test_the_command_says_it_in_a_line(sources, tmp_path):
    source, target = str(sources["qwen3_moe"]), str(tmp_path / "out")
    options = ["--override", r"down_projj$=5", "--skip", "nope"]
    result = CliRunner().invoke(app, ["quantize", source, target, *options])
    assert result.exit_code == 0, result.output
    (line,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert line.startswith("warning: kbit found no module for override 'down_projj$' (nearest: ")
    assert "model.layers.*.mlp.down_proj" in line
    assert not re.search(r"\.py:\d+", result.stderr)


def test_unmatched_names_what_is_near_and_what_experts_are_called():
    layers = [f"model.layers.{n}.self_attn.{name}_proj" for n in range(3) for name in "qkvo"]
    experts = [f"model.layers.{n}.mlp.experts" for n in range(3)]
    policy = QuantizationPolicy(overrides={r"self_atn\.q_proj$": 3}, modules_to_not_convert=["lm_haed"])
    text = unmatched(policy, [*layers, *experts], ["lm_head"])
    assert text == (
        r"kbit found no module for override 'self_atn\.q_proj$' (nearest: model.layers.*.self_attn.q_proj, "
        "model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj), "
        "skip 'lm_haed' (nearest: lm_head). A skip is a whole name, without *; an override to 0 bits is "
        "a pattern: 'self_attn=0'. "
        "All experts of a layer are one module: model.layers.*.mlp.experts."
    )
    assert unmatched(QuantizationPolicy(overrides={"q_proj": 3}), layers, []) is None
    assert unmatched(QuantizationPolicy(overrides={"self_atn": 3}), layers, []) == (
        "kbit found no module for override 'self_atn' (nearest: model.layers.*.self_attn)."  # a parent's name
    )
    overrides = QuantizationPolicy(overrides={"gate": 4, "dense": 4})
    assert unmatched(overrides, layers, ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]) == (
        "kbit found no module for override 'gate' (model.layers.*.mlp.gate has no weight that can be "
        "quantized), override 'dense'."
    )
    assert "experts" not in unmatched(policy, layers, ["lm_head"])


def test_the_policy_says_why_a_module_stays():
    policy = QuantizationPolicy(overrides={"o_proj": 0}, modules_to_not_convert=["layers.0"])
    assert policy.why_not("layers.1.q_proj") is None
    assert policy.why_not("layers.0.q_proj") == "modules_to_not_convert has 'layers.0'"
    assert policy.why_not("layers.1.o_proj") == "the override 'o_proj' is 0"
    assert policy.why_not("layers.1.mlp.gate") == "it is a router"
    assert policy.why_not("lm_head") == "the default; embedding_bits=5 quantizes it"


def test_many_overrides_are_compiled_once():
    """Python's own memory of 512 expressions would have none of them when its turn comes again."""
    names = [f"model.layers.{i}.mlp.up_proj" for i in range(600)]
    policy = kbit.QuantizationPolicy(
        overrides={f"^{re.escape(name)}$": 2 + i % 4 for i, name in enumerate(names)}
    )
    before = [kept.cache_info().misses for kept in (patterns._compiled, patterns._choices)]
    assert [policy.bits_for(name) for name in names] == [2 + i % 4 for i in range(600)]
    assert [kept.cache_info().misses for kept in (patterns._compiled, patterns._choices)] == before
