"""Requests that servers have to survive: without a length, of one id at once, with settings of all kinds."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from kbit.bench import random_models
from kbit.bench import serve as bench
from kbit.cli import serve_bodies
from serve_processes import BATCHED, own_process
from tiny_models import ARCHITECTURES, write_config

FIRST = 60  # tokens of the first answer
POSITIONS = 1400  # more than the cache of batches holds, 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose answers never end by themselves."""
    root = tmp_path_factory.mktemp("requests")
    config = ARCHITECTURES["llama"]()
    config.max_position_embeddings = POSITIONS
    random_models.write(str(write_config(config, root / "tiny.json")), None, root / "m", torch.device("cpu"))
    return root / "m"


@contextlib.contextmanager
def server(folder, options=()):
    """A server's port, and the model's name; its first answer is a long one."""
    with bench.server(folder, ["--device", "cpu", *options], start_timeout=120) as (port, _):
        assert completed((port, str(folder)), "1 2", max_tokens=FIRST) == (FIRST, "length")
        yield port, str(folder)


@pytest.fixture(scope="module")
def one_by_one(folder):
    with server(folder) as started:
        yield started


@pytest.fixture(scope="module")
def batched(folder):
    with server(folder, BATCHED) as started:
        yield started


@pytest.fixture(params=["one_by_one", "batched"])
def served(request):
    return request.getfixturevalue(request.param)


def asked(served, path, headers=None, **body):
    """The status and the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", served[0], timeout=60)
    headers = {"Content-Type": "application/json"} | (headers or {})
    connection.request("POST", path, json.dumps({"model": served[1]} | body), headers)
    with connection.getresponse() as answer:
        return answer.status, answer.read().decode()


def completed(served, prompt, **body):
    """How many tokens a completion has, and why it ended."""
    if "generation_config" in body:
        body["generation_config"] = json.dumps(body["generation_config"])
    status, answer = asked(served, "/v1/completions", prompt=prompt, **body)
    assert status == 200, answer
    answer = json.loads(answer)
    return answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]


def refused(served, path, **body):
    """The message and the field of a request that is answered with status 400."""
    status, answer = asked(served, path, **body)
    assert status == 400, answer
    error = json.loads(answer)["error"]
    return error["message"], error["param"]


def test_requests_without_a_length_get_what_generate_has(served):
    """The first answer's length, of which all later ones would be, says nothing."""
    for settings in ({}, {"max_new_tokens": None}, {"do_sample": False}):
        assert completed(served, "1 2 3", generation_config=settings) == (20, "length")
    assert completed(served, "1 2 3", generation_config={"max_length": 10}) == (7, "length")
    assert completed(served, "1 2 3", max_tokens=FIRST + 30) == (FIRST + 30, "length")


def test_a_request_without_a_length_ends_with_the_cache(batched):
    assert completed(batched, "1 " * 1010, generation_config={}) == (14, "length")
    assert asked(batched, "/v1/completions", prompt="1 2", max_tokens=2)[0] == 200


def test_a_length_of_text_ends_with_the_positions(one_by_one):
    settings = {"max_length": POSITIONS + 100, "do_sample": False}
    assert completed(one_by_one, "1 " * (POSITIONS - 5), generation_config=settings) == (5, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_text_of_no_more_than_the_prompt(stream, served):
    message, field = refused(
        served, "/v1/completions", prompt="1 2 3", generation_config='{"max_length": 3}', stream=stream
    )
    assert message.startswith("the prompt has 3 tokens, and max_length, which counts them too, is 3.")
    assert field == "generation_config"


@pytest.mark.parametrize("options", [[], BATCHED], ids=["one by one", "batched"])
def test_requests_of_one_id_at_once(options, folder):
    """Every client gets its own answer, with the id that it gave, and the server stops when it is told to."""
    with own_process(folder, options) as (process, port), ThreadPoolExecutor(4) as pool:
        served, headers = (port, str(folder)), {"X-Request-Id": "same"}

        def ask(tokens):
            body = {"prompt": "1 2 3", "max_tokens": tokens, "stream": tokens % 2 == 0}
            return asked(served, "/v1/completions", headers, **body)

        for tokens, (status, answer) in zip(counts := [40, 41, 42, 43], pool.map(ask, counts), strict=True):
            assert status == 200, answer
            assert '"id":"same"' in answer
            assert f'"completion_tokens":{tokens}' in answer
        assert completed(served, "1 2", max_tokens=3) == (3, "length")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, log
    assert "Traceback" not in log


CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
SAID = {
    CHAT: {"messages": [{"role": "user", "content": "1 2"}], "max_tokens": 2},
    RESPONSES: {"input": "1 2", "max_output_tokens": 2},
}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "chat_template_kwargs must be an object"),
        ({"tools": []}, "chat_template_kwargs may not name tools"),
        (
            {"padding": "max_length", "max_length": 2**40},
            "chat_template_kwargs may not name max_length, padding",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template_kwargs may not name chat_template"),
        ({"documents": [3]}, "chat_template_kwargs are of no use: TypeError"),
    ],
)
def test_arguments_of_the_chat_template_that_are_of_no_use(given, told, one_by_one):
    message, field = refused(one_by_one, CHAT, **SAID[CHAT], chat_template_kwargs=given)
    assert message.startswith(told)
    assert field == "chat_template_kwargs"


@pytest.mark.parametrize("path", SAID)
def test_fields_that_may_be_nothing(path, served):
    nothing = {"chat_template_kwargs": None, "parallel_tool_calls": None}
    status, answer = asked(served, path, **SAID[path], **nothing)
    assert status == 200, answer


def test_arguments_of_the_chat_template(served):
    status, answer = asked(served, CHAT, **SAID[CHAT], chat_template_kwargs={"enable_thinking": False})
    assert status == 200, answer


@pytest.mark.parametrize(
    "settings",
    [
        {"pad_token_id": "x"},
        {"bad_words_ids": 5},
        {"exponential_decay_length_penalty": 1},
        {"num_beams": 2, "length_penalty": "x"},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_settings_that_generate_does_not_survive(settings, stream, one_by_one):
    settings = json.dumps({"max_new_tokens": 3} | settings)
    body = {"prompt": "1 2 3", "generation_config": settings, "stream": stream}
    message, field = refused(one_by_one, "/v1/completions", **body)
    assert message.startswith("the request's settings are of no use: ")
    assert field == "generation_config"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"assistant_early_exit": -1},
        {"assistant_early_exit": 0},
        {"num_beams": 100_000},
        {"forced_eos_token_id": [10**9]},
        {"use_cache": False},
    ],
)
def test_later_requests_are_answered_as_before(settings, stream, served):
    """The first two had left the model without layers, the third takes all memory, the fourth a GPU's use."""
    given = {"prompt": "1 2 3", "max_tokens": 3}
    before = asked(served, "/v1/completions", **given)
    message, field = refused(
        served, "/v1/completions", **given, stream=stream, generation_config=json.dumps(settings)
    )
    assert next(iter(settings)) in message
    assert field == "generation_config"
    after = asked(served, "/v1/completions", **given)
    assert [status for status, _ in (before, after)] == [200, 200]
    first, second = (json.loads(answer)["choices"] for _, answer in (before, after))
    assert first == second


@pytest.mark.parametrize(
    "settings",
    [
        {"num_beams": 16, "length_penalty": 0.5, "early_stopping": True},
        {"do_sample": True, "min_p": 0.1, "typical_p": 0.9, "top_k": 5, "watermarking_config": {"bias": 2.0}},
        {"bad_words_ids": [[5], [6, 7]], "suppress_tokens": [8], "no_repeat_ngram_size": 2, "min_length": 4},
        {"guidance_scale": 1.5, "max_time": 60.0, "use_cache": True, "repetition_penalty": 1.1},
        {"prompt_lookup_num_tokens": 64, "max_matching_ngram_size": 16, "eos_token_id": [-1, 5]},
    ],
)
def test_settings_of_all_kinds(settings, served):
    settings = {"max_new_tokens": 3} | settings
    tokens, _ = completed(served, "1 2 3", generation_config=settings)
    assert 1 <= tokens <= 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"suppress_tokens": [*range(1000)], "temperature": 0.5},
        {"sequence_bias": [[[5], math.inf]]},
        {"sequence_bias": [[[5], 3e38]], "temperature": 0.5},
        {"repetition_penalty": 1e-38, "temperature": 0.01},
        {"watermarking_config": {"bias": 1e39}},
    ],
    ids=[*("suppressed", "infinite", "large", "tiny", "marked")],
)
def test_where_no_token_can_be_drawn(settings, stream, folder, one_by_one):
    """On a GPU, drawing one would end the server."""
    if "suppress_tokens" in settings:
        words = json.loads((folder / "config.json").read_text())["vocab_size"]
        settings = settings | {"suppress_tokens": [*range(words)]}
    settings = json.dumps({"do_sample": True, "max_new_tokens": 3} | settings)
    message, field = refused(
        one_by_one, "/v1/completions", prompt="1 2 3", stream=stream, generation_config=settings
    )
    assert "no token can be drawn by these settings" in message
    assert field == "generation_config"
    assert completed(one_by_one, "1 2", max_tokens=3) == (3, "length")


def test_a_body_larger_than_any_prompt(one_by_one):
    status, answer = asked(one_by_one, "/v1/completions", prompt="1 " * (serve_bodies.MOST_BYTES // 2))
    assert status == 413, answer
    assert json.loads(answer)["error"]["message"].startswith("a request may have at most 33,554,432 bytes")
    assert completed(one_by_one, "1 2", max_tokens=3) == (3, "length")


@pytest.mark.parametrize("path", [*SAID, "/v1/completions"])
def test_a_text_longer_than_any_prompt(path, served):
    """It is not tokenized to its end, and so its tokens are not told."""
    text = "1 " * 2**20
    given = {
        CHAT: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        RESPONSES: {"input": text},
    }
    message, field = refused(served, path, **given.get(path, {"prompt": text}))
    assert f" characters have more tokens than the {POSITIONS} positions that the model knows" in message
    assert field == {CHAT: "messages", RESPONSES: "input"}.get(path, "prompt")


def test_a_field_that_is_echoed(one_by_one):
    message, field = refused(one_by_one, RESPONSES, **SAID[RESPONSES], parallel_tool_calls="x")
    assert (message, field) == ("parallel_tool_calls must be true or false.", "parallel_tool_calls")


@pytest.mark.parametrize("path", [*SAID, "/v1/completions"])
def test_streams_that_cannot_be_computed_do_not_begin(path, one_by_one):
    """Chats and responses would begin with chunks that need no model."""
    given = SAID.get(path, {"prompt": "1 2"})
    wrong = json.dumps({"max_new_tokens": 3, "bad_words_ids": 'x"y'})
    message, field = refused(one_by_one, path, **given, stream=True, generation_config=wrong)
    assert message.startswith("the request's settings are of no use: ")
    assert field == "generation_config"


@pytest.mark.parametrize("path", [*SAID, "/v1/completions"])
def test_streams(path, served):
    status, answer = asked(served, path, **SAID.get(path, {"prompt": "1 2", "max_tokens": 2}), stream=True)
    assert status == 200, answer
    *_, last = [json.loads(line.partition("data: ")[2]) for line in answer.split("\n\n") if line]
    usage = last.get("usage") or last["response"]["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 2


@pytest.mark.parametrize("nothing", [None, []])
def test_answers_that_are_given_back_without_tool_calls(nothing, served):
    """Read as those that have no such field, content and all."""
    turns = [{"role": "user", "content": "1 2"}, {"role": "assistant", "content": "3 4 5"}]
    for more in ({}, {"tool_calls": nothing}):
        body = {"messages": [turns[0], turns[1] | more, {"role": "user", "content": "6"}], "max_tokens": 2}
        status, answer = asked(served, CHAT, **body)
        assert status == 200, answer
        assert json.loads(answer)["usage"]["prompt_tokens"] == 9  # each begins with a token


@pytest.mark.parametrize("options", [[], BATCHED], ids=["one by one", "batched"])
def test_a_models_own_settings_that_an_answer_cannot_have(options, folder, tmp_path):
    own = shutil.copytree(folder, tmp_path / "own")
    file = own / "generation_config.json"
    wished = {"num_beams": 2, "num_return_sequences": 2, "return_dict_in_generate": True}
    wished["sequence_bias"] = [[[5], -30.0]]
    file.write_text(json.dumps(json.loads(file.read_text()) | wished))
    with server(own, options) as served:
        for stream in (False, True):
            status, answer = asked(served, CHAT, **SAID[CHAT], stream=stream)
            assert status == 200, answer
            assert '"completion_tokens":2' in answer


def test_biases_of_json(one_by_one):
    """A list, since an object's names would be texts."""
    for bias in ([[[5], 100.0]], [[[5], 100.0], [[6, 7], -1.0]]):
        settings = json.dumps({"sequence_bias": bias, "max_new_tokens": 3, "do_sample": False})
        status, answer = asked(one_by_one, "/v1/completions", prompt="1 2", generation_config=settings)
        assert status == 200, answer
        assert len(set(json.loads(answer)["choices"][0]["text"].split())) == 1


@pytest.mark.parametrize("content", ["application/json", "multipart/form-data; boundary=x"])
def test_sound_is_refused(content, one_by_one):
    status, answer = asked(one_by_one, "/v1/audio/transcriptions", {"Content-Type": content})
    assert status == 400, answer
    assert json.loads(answer)["error"]["message"].startswith("this server transcribes no sound.")


def test_no_other_model_is_loaded(one_by_one, tmp_path):
    for name in ("org/model", str(tmp_path), f"{one_by_one[1]}@other"):
        message, field = refused(one_by_one, "/load_model", model=name)
        assert (message, field) == (f"this server has no other model than {one_by_one[1]}.", "model")
    status, answer = asked(one_by_one, "/load_model")
    assert (status, '"status": "ready"' in answer) == (200, True)


def test_the_name_of_a_model_to_load_is_text(one_by_one):
    status, answer = asked(one_by_one, "/load_model", model=3)
    assert (status, json.loads(answer)["detail"]) == (422, "model must be a string, got 3.")


def test_a_temperature_beside_settings_has_tokens_drawn(one_by_one):
    """Of which each seed has others."""
    texts = set()
    for seed in range(4):
        body = {"prompt": "1 2 3", "temperature": 5.0, "seed": seed, "generation_config": "{}"}
        status, answer = asked(one_by_one, "/v1/completions", **body)
        assert status == 200, answer
        texts.add(json.loads(answer)["choices"][0]["text"])
    assert len(texts) > 1
