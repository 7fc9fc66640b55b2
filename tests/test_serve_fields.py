"""Fields of a request to the server: those of a wrong kind are told so, before anything is computed."""

import json
from types import SimpleNamespace

import pytest
from transformers import GenerationConfig, PretrainedConfig

from kbit.cli import serve_fields, serve_requests

USER = {"role": "user", "content": "w1"}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"stop": 5}, "stop must be a string or a list"),
        ({"stop": ["w1", ""]}, "stop must be a string or a list"),
        ({"stop": ["w1"] * 5}, "stop may be at most 4 strings of at most 64 characters, got 5"),
        ({"stop": "w" * 65}, "stop may be at most 4 strings"),
        ({"generation_config": json.dumps({"stop_strings": "w" * 65})}, "stop may be at most 4 strings"),
        ({"generation_config": json.dumps({"stop_strings": [5]})}, "stop must be a string or a list"),
        ({"logit_bias": [1]}, "logit_bias must be an object"),
        ({"logit_bias": {"5": "x"}}, "logit_bias must be an object"),
        ({"logit_bias": {"w1": 1}}, "logit_bias must be an object"),
        ({"logit_bias": {"5": float("nan")}}, "logit_bias must be an object"),
        ({"suffix": 5}, "suffix must be a string"),
        ({"stop": "w1\ud800"}, "stop has half a surrogate pair"),
        ({"instructions": 5}, "instructions must be a string"),
        ({"tools": [5]}, "tools must be a list of objects"),
        ({"generation_config": json.dumps({"eos_token_id": "x"})}, "eos_token_id must be a whole number"),
        ({"generation_config": json.dumps({"eos_token_id": [[2]]})}, "eos_token_id must be a whole number"),
        ({"generation_config": json.dumps({"eos_token_id": 1.5})}, "eos_token_id must be a whole number"),
    ],
)
def test_wrong_settings(body, told):
    with pytest.raises(serve_fields.RequestError, match=told) as found:
        serve_fields.check_settings(body)
    assert found.value.field in body


def test_settings_that_may_be():
    serve_fields.check_settings(
        {"stop": "w1", "suffix": "w2", "tools": [], "logit_bias": {"5": 1, "6": -0.5}}
    )
    serve_fields.check_settings({"stop": ["w1"], "generation_config": json.dumps({"eos_token_id": [1, 2]})})
    serve_fields.check_settings({})


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"content": [{"type": "text"}]}, "content must have objects as parts"),
        ({"content": [{"type": "text", "text": 5}]}, "content must have objects as parts"),
        ({"tool_calls": 5}, "tool_calls must be a list of objects"),
        ({"tool_calls": [5]}, "tool_calls must be a list of objects"),
        ({"content": [{"type": "text", "text": "w1"}], "tool_calls": [{}]}, None),
    ],
)
def test_messages(more, told):
    found = serve_fields.wrong_messages([USER, USER | more])
    assert found is None if told is None else found.startswith(f"messages[1].{told}")


@pytest.mark.parametrize(
    ("body", "drawn"), [({"temperature": 0.8}, True), ({"temperature": 0}, False), ({}, None)]
)
def test_a_temperature_has_tokens_drawn(body, drawn):
    settings = serve_requests._settled(lambda self, body: GenerationConfig())(None, body)
    assert bool(settings.do_sample) == bool(drawn)


def test_biases_of_tokens_are_heeded_everywhere():
    settings = serve_requests._settled(lambda self, body: GenerationConfig())(None, {"logit_bias": {"5": 1}})
    assert settings.sequence_bias == {(5,): 1.0}
    settings = serve_requests._settled(lambda self, body: GenerationConfig())(None, {"logit_bias": {}})
    assert settings.sequence_bias is None


def test_biases_of_tokens_that_there_are_not_are_refused():
    model, settings = SimpleNamespace(config=PretrainedConfig(vocab_size=72)), GenerationConfig()
    for settings.sequence_bias in (None, {(0,): 1.0, (71,): 1.0}):
        serve_requests._check_bias(settings, model)
    settings.sequence_bias = {(72,): 1.0}
    with pytest.raises(serve_fields.RequestError, match="names token 72, and the model has 72"):
        serve_requests._check_bias(settings, model)


def test_biases_become_floats():
    made = GenerationConfig(sequence_bias={(5,): 1})
    settings = serve_requests._settled(lambda self, body: made)(None, {})
    assert [type(one) for one in settings.sequence_bias.values()] == [float]
