"""Fields of a request to the server: those of a wrong kind are told so, before anything is computed."""

import inspect
import json
from types import SimpleNamespace
from typing import TypedDict

import pytest
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

from kbit.cli import serve_fields, serve_fitting, serve_requests, serve_template

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
        ({"parallel_tool_calls": "x"}, "parallel_tool_calls must be true or false"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"tools": None, "x": 1}}, "chat_template_kwargs may not name tools: they"),
        (
            {"chat_template_kwargs": {"padding": "max_length", "max_length": 2**40}},
            "max_length, padding: they",
        ),
        ({"chat_template_kwargs": {"truncation": True, "max_length": 1}}, "max_length, truncation: they"),
        (
            {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            "chat_template_kwargs may not name chat_temp",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs may not name messages: they"),
        ({"generation_config": json.dumps({"eos_token_id": "x"})}, "eos_token_id must be a whole number"),
        ({"generation_config": json.dumps({"eos_token_id": [[2]]})}, "eos_token_id must be a whole number"),
        ({"generation_config": json.dumps({"eos_token_id": 1.5})}, "eos_token_id must be a whole number"),
    ],
)
def test_wrong_settings(body, told):
    with pytest.raises(serve_fields.RequestError, match=told) as found:
        serve_fields.check_settings(body)
    assert found.value.field in body


@pytest.mark.parametrize("kind", [PreTrainedTokenizerBase, ProcessorMixin])
def test_only_what_templates_take_may_be_named(kind):
    """Not what the function that applies them takes itself, nor what that tells a tokenizer."""
    parameters = {*inspect.signature(kind.apply_chat_template).parameters, "return_length", "images_kwargs"}
    for name in parameters - {"self", "kwargs", "documents"}:
        assert serve_template.wrong_template_kwargs({name: None}).startswith(f"may not name {name}: ")
    for name in ("enable_thinking", "documents", "reasoning_effort", "custom_tools", "date_string"):
        assert serve_template.wrong_template_kwargs({name: None}) is None


def test_what_a_processor_of_images_takes_is_not_the_templates():
    class Images(TypedDict, total=False):
        most_pixels: int

    class Kwargs(TypedDict, total=False):
        images_kwargs: Images

    settings = {"chat_template_kwargs": {"most_pixels": 10**12}}
    serve_fields.check_settings(settings)
    with pytest.raises(serve_fields.RequestError, match="may not name most_pixels: they"):
        serve_fields.check_settings(settings, SimpleNamespace(valid_processor_kwargs=Kwargs))


def test_settings_that_may_be():
    serve_fields.check_settings(
        {"stop": "w1", "suffix": "w2", "tools": [], "logit_bias": {"5": 1, "6": -0.5}}
    )
    serve_fields.check_settings({"stop": ["w1"], "generation_config": json.dumps({"eos_token_id": [1, 2]})})
    serve_fields.check_settings({"chat_template_kwargs": {"enable_thinking": False}})
    serve_fields.check_settings({"chat_template_kwargs": None, "parallel_tool_calls": None})
    serve_fields.check_settings({"parallel_tool_calls": True})
    serve_fields.check_settings({})


@pytest.mark.parametrize("length", [0, -5, 2.5, "x"])
def test_a_length_of_text_that_is_none(length):
    body = {"generation_config": json.dumps({"max_length": length})}
    with pytest.raises(serve_fields.RequestError, match="max_length must be a whole number"):
        serve_fields.check_settings(body)


def test_fields_that_say_nothing_are_left_out():
    said = {"stop": ["w1"], "chat_template_kwargs": {}, "parallel_tool_calls": False, "tools": None}
    assert serve_fields.without_nothings(said) == said
    nothing = {"stop": [], "chat_template_kwargs": None, "parallel_tool_calls": None, "tools": None}
    assert serve_fields.without_nothings(nothing) == {"tools": None}


@pytest.mark.parametrize("nothing", [None, []])
def test_messages_without_tool_calls_keep_their_content(nothing):
    said, called = USER | {"role": "assistant"}, USER | {"tool_calls": [{"function": {"name": "f"}}]}
    messages = [USER, said | {"tool_calls": nothing}, called]
    assert serve_fields.without_nothings({"messages": messages}) == {"messages": [USER, said, called]}


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
    ("body", "drawn"),
    [
        ({"temperature": 0.8}, True),
        ({"temperature": 0}, False),
        ({}, None),
        ({"temperature": 0.8, "generation_config": "{}"}, True),
        ({"temperature": 0.8, "generation_config": '{"do_sample": null}'}, True),
        ({"temperature": 0.8, "generation_config": '{"do_sample": false}'}, False),
    ],
)
def test_a_temperature_has_tokens_drawn(body, drawn):
    def build(self, body):
        return GenerationConfig(**json.loads(body.get("generation_config", "{}")))

    settings = serve_requests._settled(build)(None, body)
    assert bool(settings.do_sample) == bool(drawn)


def test_biases_of_tokens_are_heeded_everywhere():
    settings = serve_requests._settled(lambda self, body: GenerationConfig())(None, {"logit_bias": {"5": 1}})
    assert settings.sequence_bias == {(5,): 1.0}
    settings = serve_requests._settled(lambda self, body: GenerationConfig())(None, {"logit_bias": {}})
    assert settings.sequence_bias is None


def test_biases_of_tokens_that_there_are_not_are_refused():
    model, settings = SimpleNamespace(config=PretrainedConfig(vocab_size=72)), GenerationConfig()
    for settings.sequence_bias in (None, {(0,): 1.0, (71,): 1.0}):
        serve_fitting._check_bias(settings, model)
    settings.sequence_bias = {(72,): 1.0}
    with pytest.raises(serve_fields.RequestError, match="names token 72, and the model has 72"):
        serve_fitting._check_bias(settings, model)

    settings.sequence_bias = [[[5], -3.0], [[5, 72], 1.0]]
    with pytest.raises(serve_fields.RequestError, match="names token 72, and the model has 72"):
        serve_fitting._check_bias(settings, model)


def test_tokens_that_there_are_not_are_refused():
    model = SimpleNamespace(config=PretrainedConfig(vocab_size=72), generation_config=GenerationConfig())
    model.generation_config.pad_token_id = 100  # its own, which nobody looks for
    for given in ({}, {"pad_token_id": 100}, {"eos_token_id": [-1, 71]}, {"forced_eos_token_id": 0}):
        serve_fitting._check_tokens(GenerationConfig(**given), model)
    for given in ({"forced_eos_token_id": [5, 72]}, {"eos_token_id": 72}, {"pad_token_id": -2}):
        with pytest.raises(
            serve_fields.RequestError, match="names token (72|-2), and the model has 72"
        ) as found:
            serve_fitting._check_tokens(GenerationConfig(**given), model)
        assert found.value.field == "generation_config"


@pytest.mark.parametrize("given", [{(5,): 1, (6, 7): -3}, [[[5], 1], [[6, 7], -3]]], ids=["object", "list"])
def test_biases_become_floats(given):
    made = GenerationConfig(sequence_bias=given)
    settings = serve_requests._settled(lambda self, body: made)(None, {})
    assert settings.sequence_bias == {(5,): 1.0, (6, 7): -3.0}
    assert [type(one) for one in settings.sequence_bias.values()] == [float] * 2


def test_an_answer_is_one_whatever_the_models_settings_say():
    def settled(**body):
        def build(self, body):
            own = '{"num_beams": 2, "num_return_sequences": 2}'
            return GenerationConfig(**json.loads(body.get("generation_config", own)))

        settings = serve_requests._settled(build)(None, body)
        return settings.num_beams, settings.num_return_sequences

    assert settled() == settled(stream=True) == settled(generation_config="{}") == (1, 1)
    assert settled(generation_config='{"num_beams": 3}') == (3, 1)
    assert settled(generation_config='{"num_beams": 1}', stream=True) == (1, 1)
    for asked, stream in (
        ("num_beams", True),
        ("num_return_sequences", True),
        ("num_return_sequences", False),
    ):
        with pytest.raises(serve_fields.RequestError, match=f"no use: {asked} of .* is 1, got 3.") as found:
            settled(generation_config=json.dumps({asked: 3, "do_sample": True}), stream=stream)
        assert found.value.field == "generation_config"


@pytest.mark.parametrize("text", [None, "{}"])
def test_the_field_of_settings_of_no_use_is_named(text):
    def build(self, body):
        raise ValueError("no")

    with pytest.raises(serve_fields.RequestError, match="of no use: no") as found:
        serve_requests._settled(build)(None, {"generation_config": text})
    assert found.value.field == (text and "generation_config")


def test_the_length_of_an_answer():
    """By the first that says so: the request, the model's own settings, and `generate`."""
    length, own = 10, GenerationConfig(max_new_tokens=7)
    for settings, its_own, room, positions, left in (
        (GenerationConfig(max_new_tokens=5), own, None, None, 5),
        (GenerationConfig(max_length=18), own, None, None, 8),
        (GenerationConfig(max_length=18, max_new_tokens=5), own, None, None, 5),
        (GenerationConfig(), own, None, None, 7),
        (GenerationConfig(), GenerationConfig(max_length=16), None, None, 6),
        (GenerationConfig(), GenerationConfig(), None, None, 20),
        (GenerationConfig(), GenerationConfig(), 14, None, 4),
        (GenerationConfig(max_length=900), own, None, 50, 40),
        (GenerationConfig(max_length=900), own, 30, 50, 20),
    ):
        serve_fitting.fit(length, settings, room, positions, its_own)
        assert (settings.max_new_tokens, settings.max_length) == (left, None)
    for most in (3, length):
        with pytest.raises(
            serve_fields.RequestError, match=f"the prompt has 10 tokens, and max_length.*{most}"
        ):
            serve_fitting.fit(length, GenerationConfig(max_length=most), None)


def raised(call):
    with pytest.raises(Exception) as found:  # noqa: PT011
        call()
    return found.value


def apply_chat_template(error):
    raise error


SETTINGS, KWARGS = {"generation_config": "{}"}, {"chat_template_kwargs": {"x": 1}}


@pytest.mark.parametrize(
    ("error", "body", "field"),
    [
        (ValueError("v"), {}, None),
        (ZeroDivisionError("z"), {}, None),
        (RuntimeError("r"), KWARGS, None),
        (ValueError("v"), KWARGS, "chat_template_kwargs"),
        (RuntimeError("r"), SETTINGS, "generation_config"),
        (ImportError("i"), SETTINGS | KWARGS, "generation_config"),
        (AssertionError("a"), SETTINGS, "generation_config"),
    ],
)
def test_errors_that_a_request_brought_about(error, body, field):
    told = serve_requests._explained(error, body, "messages")
    assert (told and told.field) == field


@pytest.mark.parametrize(
    ("error", "body", "field"),
    [
        (ZeroDivisionError("z"), {}, "messages"),
        (TypeError("t"), {}, None),
        (TypeError("t"), SETTINGS | KWARGS, "chat_template_kwargs"),
        (AttributeError("a"), KWARGS, "chat_template_kwargs"),
    ],
)
def test_errors_of_the_chat_template(error, body, field):
    told = serve_requests._explained(raised(lambda: apply_chat_template(error)), body, "messages")
    assert (told and told.field) == field
