"""A request's generation_config: nothing that changes the model for others, or makes endless work."""

import json

import pytest
from transformers import GenerationConfig

from kbit.cli import serve_fields, serve_settings
from tiny_models import ARCHITECTURES

FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}


def refused(settings):
    """What is said of settings."""
    with pytest.raises(serve_fields.RequestError) as found:
        serve_fields.check_settings({"generation_config": json.dumps(settings)})
    assert found.value.field == "generation_config"
    return str(found.value)


@pytest.mark.parametrize("name", [*sorted(FIELDS - serve_settings._TAKEN), "custom_generate", "max_token"])
def test_what_is_not_an_answers_own_is_refused(name):
    """Whatever this version of transformers has, and what it has not."""
    for value in (0, 1, 2.5, "x", [1], {}):
        told = refused({"max_new_tokens": 3, name: value})
        assert told.startswith(f"generation_config may not set {name}: ")


@pytest.mark.parametrize("name", ["assistant_early_exit", "use_mtp", "is_assistant", "compile_config"])
@pytest.mark.parametrize("value", [False, True])
def test_no_truth_value_is_taken_for_nothing(name, value):
    assert refused({name: value}).startswith(f"generation_config may not set {name}: ")


def test_all_that_is_refused_is_named():
    told = refused({"top_p": 0.5, "use_cache": False, "return_dict_in_generate": True, "cache_config": {}})
    assert "may not set cache_config, return_dict_in_generate, use_cache: " in told
    assert len(refused({"x" * 1000: 1})) < 300


def test_what_may_be_set_is_what_transformers_has():
    assert {"_from_model_config", "_commit_hash"} == serve_settings._TAKEN - FIELDS
    assert serve_settings._SAYS_NOTHING.keys() <= FIELDS


@pytest.mark.parametrize("use_diff", [False, True])
def test_settings_as_transformers_writes_them_may_be_sent(use_diff):
    """With what a model's own settings have, that nobody asked for."""
    for settings in (
        GenerationConfig(max_new_tokens=5, do_sample=True, top_p=0.9, num_beams=2),
        GenerationConfig.from_model_config(ARCHITECTURES["llama"]()),
    ):
        text = settings.to_json_string(use_diff=use_diff)
        assert not use_diff or "transformers_version" in text
        serve_fields.check_settings({"generation_config": text})


@pytest.mark.parametrize(("name", "most"), serve_settings._MOST.items())
def test_numbers_that_multiply_the_work(name, most):
    for value in (None, 1, most):
        serve_fields.check_settings({"generation_config": json.dumps({name: value})})
    for value in (0, -1, most + 1, 10**30, 2.0, True, "2", [2]):
        told = f"{name} must be a whole number from 1 to {most}, got {value!r}."
        assert refused({name: value}) == told


def test_many_ends_are_for_one_beam():
    """With beams each makes copies of all their texts: 16 beams by 16000 ends of 2048 tokens had 4 GB."""
    ends = list(range(17))
    for settings in ({"eos_token_id": ends}, {"eos_token_id": ends[1:], "num_beams": 2}):
        serve_fields.check_settings({"generation_config": json.dumps(settings)})
    told = refused({"eos_token_id": ends, "num_beams": 2})
    assert told == "eos_token_id may have at most 16 tokens beside num_beams, got 17."
