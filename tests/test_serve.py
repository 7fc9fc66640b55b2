"""A served k-bit checkpoint: `transformers serve` on loopback, concurrent clients, and generate_batch."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedTokenizerFast,
    modeling_flash_attention_utils,
)
from transformers.generation.continuous_batching import cache, continuous_api
from typer.testing import CliRunner

import kbit
from kbit.bench import serve as bench
from kbit.cli import app, serve_batching, serve_fields, serve_fitting, serve_gone, serve_graphs, texts
from kbit.integrations.transformers.cuda_graphs import Steps
from parallel_models import PARALLEL, build_parallel
from serve_processes import BATCHED, own_process
from tiny_models import write_config

REFUSAL = "{% if m.role == 'nobody' %}{{ raise_exception('no') }}{% endif %}"
TEMPLATE = f"{{% for m in messages %}}{REFUSAL}<s>{{{{ m['content'] }}}}{{% endfor %}}"
PLAN = bench.Plan(clients=(1, 8), requests=2, prompt_words=8, new_tokens=4, timeout=60)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{"bf16": unquantized, "kbit": quantized} folders with a tokenizer of whole words."""
    root = tmp_path_factory.mktemp("served")
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(296))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    model = build_parallel("llama", spread=False, vocab_size=len(vocabulary), max_position_embeddings=2048)
    model.generation_config.eos_token_id = None  # so that every answer has the tokens asked for
    model.save_pretrained(root / "bf16")
    quantized = AutoModelForCausalLM.from_pretrained(
        root / "bf16", quantization_config=kbit.KbitConfig(bits=4)
    )
    quantized.save_pretrained(root / "kbit")
    for name in ("bf16", "kbit"):
        fast.save_pretrained(root / name)
    return {name: root / name for name in ("bf16", "kbit")}


@pytest.fixture(scope="module", params=[[], BATCHED], ids=["one by one", "batched"])
def served(request, folders):
    """(port, process id) of a server of the quantized model."""
    with bench.server(folders["kbit"], ["--device", "cpu", *request.param], start_timeout=120) as started:
        yield started


def expected(folder, prompt, tokens, device="cpu"):
    """What the model generates greedily in this process."""
    model = AutoModelForCausalLM.from_pretrained(folder).to(device)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = tokenizer(f"<s>{prompt}", return_tensors="pt", add_special_tokens=False)["input_ids"]
    generated = model.generate(ids.to(device), max_new_tokens=tokens, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(generated, skip_special_tokens=True)


def test_the_server_answers_as_the_model_does(served, folders):
    answer = bench.chat(served[0], str(folders["kbit"]), "w1 w2 w3", 8)
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["choices"][0]["message"]["content"] == expected(folders["kbit"], "w1 w2 w3", 8)


def test_the_list_of_models_names_the_served_one(served, folders):
    status, answer = bench._request(served[0], "GET", "/v1/models", None, 10.0)
    assert status == 200, answer
    assert [model["id"] for model in json.loads(answer)["data"]] == [str(folders["kbit"])]


USER = {"role": "user", "content": "w1"}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("chat/completions", {}, "messages must be a list of at least one"),
        ("chat/completions", {"messages": []}, "messages must be a list of at least one"),
        ("chat/completions", {"messages": "w1"}, "messages must be a list of at least one"),
        ("chat/completions", {"messages": [USER, "w1"]}, "messages[1] must be an object with a role"),
        ("chat/completions", {"messages": [{"content": "w1"}]}, "messages[0] must be an object with a role"),
        ("chat/completions", {"messages": [USER | {"content": 1}]}, "messages[0].content must be a string"),
        ("chat/completions", {"messages": [USER], "max_tokens": "many"}, "max_tokens must be a whole number"),
        ("chat/completions", {"messages": [USER], "temperature": "hot"}, "temperature must be a number"),
        ("chat/completions", {"messages": [USER], "temperature": 1e-45}, "temperature must be a number, 0"),
        ("chat/completions", {"messages": [USER], "temperature": -1}, "temperature must be a number, 0"),
        ("chat/completions", {"messages": [USER], "top_p": -3}, "top_p must be a number, above 0"),
        ("chat/completions", {"messages": [USER], "frequency_penalty": -1}, "frequency_penalty must be a"),
        ("chat/completions", {"messages": [USER], "seed": 1.5}, "seed must be a whole number"),
        ("chat/completions", {"messages": [USER], "seed": 2**80}, "seed must be a whole number of 64 bits"),
        ("chat/completions", {"messages": [USER], "tools": 5}, "tools must be a list of objects"),
        (
            "chat/completions",
            {"messages": [USER | {"content": [5]}]},
            "messages[0].content must have objects",
        ),
        ("completions", {"prompt": "w1", "generation_config": "{bad"}, "generation_config must be a string"),
        ("completions", {"prompt": "w1", "generation_config": "5"}, "generation_config must be a string"),
        ("completions", {}, "prompt must be a string"),
        ("completions", {"prompt": ["w1"]}, "prompt must be a string"),
        ("completions", {"prompt": "w1", "max_tokens": 0}, "max_tokens must be a whole number"),
        ("completions", {"prompt": "\ud800"}, "prompt has half a surrogate pair"),
        (
            "chat/completions",
            {"messages": [USER | {"tool_calls": [{}]}]},
            "messages cannot be read: KeyError",
        ),
        ("responses", {"input": [{}]}, "input cannot be read: KeyError"),
        ("responses", {"input": [USER | {"content": 5}]}, "input cannot be read: TypeError"),
        ("responses", {}, "input must be a string or a list"),
        ("responses", {"input": []}, "input must be a string, or a list of at least one object"),
        ("responses", {"input": ["w1"]}, "input must be a string, or a list of at least one object"),
        ("responses", {"input": "w1", "max_output_tokens": -1}, "max_output_tokens must be a whole number"),
    ],
)
def test_malformed_requests_are_told_what_they_lack(path, body, told, served, folders):
    body = {"model": str(folders["kbit"])} | body
    status, answer = bench._request(served[0], "POST", f"/v1/{path}", body, 60.0)
    assert status == 400, answer
    error = json.loads(answer)["error"]
    assert error["message"].startswith(told)
    assert (error["type"], error["param"]) == ("invalid_request_error", told.partition("[")[0].split()[0])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"temperature": 1e-45}, "temperature must be a number, 0"),
        ({"pad_token_id": "x"}, "the request's settings are of no use"),
    ],
)
def test_settings_in_a_string_are_checked_too(settings, told, served, folders):
    body = {"model": str(folders["kbit"]), "prompt": "w1", "generation_config": json.dumps(settings)}
    status, answer = bench._request(served[0], "POST", "/v1/completions", body, 60.0)
    assert status == 400, answer
    assert json.loads(answer)["error"]["message"].startswith(told)


def test_what_the_template_refuses_is_told(served, folders):
    message = {"role": "nobody", "content": "w1"}
    body = {"model": str(folders["kbit"]), "messages": [message]}
    status, answer = bench._request(served[0], "POST", "/v1/chat/completions", body, 60.0)
    assert status == 400, answer
    assert json.loads(answer)["error"]["message"] == "the model's chat template refuses this: no."


def test_an_empty_list_of_stops_stops_nothing(served, folders):
    body = {"model": str(folders["kbit"]), "prompt": "w1", "max_tokens": 2, "stop": []}
    status, answer = bench._request(served[0], "POST", "/v1/completions", body, 60.0)
    assert status == 200, answer


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_tokens_is_refused_and_the_server_lives(stream, served, folders):
    body = {"model": str(folders["kbit"]), "prompt": "", "max_tokens": 2, "stream": stream}
    status, answer = bench._request(served[0], "POST", "/v1/completions", body, 60.0)
    assert status == 400, answer
    assert "the prompt has no tokens" in json.loads(answer)["error"]["message"]
    assert bench._request(served[0], "GET", "/health", None, 10.0)[0] == 200
    assert bench.chat(served[0], str(folders["kbit"]), "w1", 2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("served", [[], BATCHED], indirect=True, ids=["one by one", "batched"])
def test_biases_may_be_whole_numbers(served, folders):
    body = {"model": str(folders["kbit"]), "max_tokens": 2, "logit_bias": {"5": 100}}
    for way, more in (("chat/completions", {"messages": [USER]}), ("completions", {"prompt": "w1"})):
        status, answer = bench._request(served[0], "POST", f"/v1/{way}", body | more, 60.0)
        assert status == 200, answer


def test_the_first_of_batched_requests_does_not_decide_for_all(folders):
    model = str(folders["kbit"])
    strange = {"guidance_scale": 3.0, "max_new_tokens": 3, "repetition_penalty": 5.0}
    with bench.server(folders["kbit"], ["--device", "cpu", *BATCHED], start_timeout=120) as (port, _):
        body = {"model": model, "prompt": "w1", "generation_config": json.dumps(strange)}
        status, answer = bench._request(port, "POST", "/v1/completions", body, 60.0)
        assert status == 200, answer
        answer = bench.chat(port, model, "w1 w2 w3", 8)
        assert answer["choices"][0]["message"]["content"] == expected(folders["kbit"], "w1 w2 w3", 8)


@pytest.mark.parametrize("served", [BATCHED], indirect=True, ids=["batched"])
def test_a_request_larger_than_the_cache_is_cut_or_refused(served, folders):
    body = {"model": str(folders["kbit"]), "max_tokens": 100}
    status, answer = bench._request(
        served[0], "POST", "/v1/completions", body | {"prompt": "w1 " * 1000}, 60.0
    )
    assert status == 200, answer
    cut = json.loads(answer)
    assert cut["choices"][0]["finish_reason"] == "length"
    assert 1 < cut["usage"]["completion_tokens"] < 100
    assert cut["usage"]["total_tokens"] <= 1024
    status, answer = bench._request(
        served[0], "POST", "/v1/completions", body | {"prompt": "w1 " * 1100}, 60.0
    )
    assert status == 400, answer
    assert "the server's cache holds 1024" in json.loads(answer)["error"]["message"]
    assert bench._request(served[0], "GET", "/health", None, 10.0)[0] == 200


def test_concurrent_clients_get_answers_and_memory_stays_flat(served, folders):
    levels = list(bench.load(*served, str(folders["kbit"]), PLAN))
    for level in levels:
        assert not level.errors
        assert len(level.latencies) == level.requests == level.clients * PLAN.requests
        assert level.tokens == level.requests * PLAN.new_tokens
        assert level.percentile(95) >= level.percentile(50) > 0
    again = list(bench.load(*served, str(folders["kbit"]), PLAN))
    # After as many requests again; torch and the web server keep a few buffers of their own.
    assert again[-1].resident_bytes - levels[-1].resident_bytes < 50e6


def test_the_example_client(served, folders):
    example = Path(__file__).parents[1] / "examples" / "client.py"
    url = f"http://127.0.0.1:{served[0]}/v1"
    program = [sys.executable, str(example), str(folders["kbit"]), "w1 w2 w3", "--url", url, "--tokens", "8"]
    environment = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    result = subprocess.run(program, capture_output=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stdout.decode() == expected(folders["kbit"], "w1 w2 w3", 8) + "\n"


def test_generate_batch_equals_generate(folders):
    model, other = (AutoModelForCausalLM.from_pretrained(folders["kbit"]).eval() for _ in range(2))
    prompts = [[1, 5, 9, 3], [2, 4, 8, 70, 71, 9], [7], list(range(10, 40))]
    config = model.generation_config
    config.do_sample, config.max_new_tokens = False, 6
    batching = ContinuousBatchingConfig(block_size=16, num_blocks=64, max_batch_tokens=64)
    outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
    results = sorted(outputs.values(), key=lambda output: prompts.index(list(output.prompt_ids)))
    for prompt, output in zip(prompts, results, strict=True):
        alone = other.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert list(output.generated_tokens) == alone[0, len(prompt) :].tolist()


def attended(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size):
    """PyTorch's attention of sequences of any lengths, as a CPU computes it."""
    assert window_size == (-1, 0)
    out = torch.full_like(q, float("nan"))
    for first, end, key, key_end in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:], strict=False):
        assert end - first <= max_q
        assert key_end - key <= max_k
        behind = torch.arange(key_end - key) - (key_end - key - (end - first))
        mask = behind <= torch.arange(end - first)[:, None]
        one = (q[first:end], k[key:key_end], v[key:key_end])
        query, keys, values = (tensor.transpose(0, 1)[None] for tensor in one)
        made = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[first:end] = made[0].transpose(0, 1)
    return out


@pytest.fixture
def flash(monkeypatch):
    """Continuous batching with flash attention, put back afterwards; the models that took it."""
    manager, utils = continuous_api.ContinuousBatchingManager, modeling_flash_attention_utils
    for owner, name in ((manager, "switch_to_cb_friendly_attn"), (utils, "_lazy_imports")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(utils, "_loaded_implementation", None)
    monkeypatch.setattr(serve_batching, "_varlen", lambda: attended)
    took = []
    monkeypatch.setattr(serve_batching, "takes", lambda model: took.append(model) or True)
    serve_batching.speed_up()
    return took


def test_batches_with_flash_attention(folders, flash):
    test_generate_batch_equals_generate(folders)
    assert flash


def test_batches_are_no_larger_than_in_newer_versions(monkeypatch):
    def infer(self):
        return 50_000_000, 64

    monkeypatch.setattr(cache.PagedAttentionMemoryHandler, serve_batching._INFER, infer, raising=False)
    serve_batching._bound_batches()
    handler = object.__new__(cache.PagedAttentionMemoryHandler)
    for given, want in ((None, 8192), (50_000_000, 50_000_000)):
        handler.cb_config = ContinuousBatchingConfig(max_batch_tokens=given)
        assert getattr(handler, serve_batching._INFER)() == (want, 64)


def test_what_flash_attention_does_not_take(monkeypatch):
    model = build_parallel("llama").bfloat16()
    assert not serve_batching.takes(model)  # on a CPU
    monkeypatch.setattr(serve_batching, "_has_kernel", lambda device: True)
    assert serve_batching.takes(model)
    model.config.head_dim = 512
    assert not serve_batching.takes(model)
    assert not serve_batching.takes(build_parallel("llama").float())


@pytest.mark.gpu
@pytest.mark.parametrize("options", [[], BATCHED], ids=["one by one", "batched"])
def test_answers_from_cuda_graphs(options, folders):
    model = folders["kbit"]
    with bench.server(model, ["--device", "cuda", "--cuda-graphs", *options], 120) as (port, _):
        for prompt in ("w1 w2 w3", "w7", "w1 w2 w3"):
            answer = bench.chat(port, str(model), prompt, 12)
            assert answer["choices"][0]["message"]["content"] == expected(model, prompt, 12, "cuda")


def test_cuda_graphs_need_a_gpu(folders, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["serve", str(folders["kbit"]), "--port", "0", "--cuda-graphs"])
    assert "--cuda-graphs needs a GPU" in str(result.exception)


def test_cuda_graphs_of_the_server_are_padded_less(monkeypatch):
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import CBGenerateManager

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(ModelManager, "_load_model", lambda self, name: build_parallel("llama"))
    monkeypatch.setattr(CBGenerateManager, "__init__", CBGenerateManager.__init__)  # restored by the fixture
    serve_graphs.use_cuda_graphs()
    model = ModelManager._load_model(None, "model@main")
    assert isinstance(model.get_compiled_call(None), Steps)
    for own, padding in ((0, 1024), (512, 512)):
        config = ContinuousBatchingConfig(use_cuda_graph=True, kv_padding_interval_size=own)
        manager = CBGenerateManager(config)
        assert (config.q_padding_interval_size, config.kv_padding_interval_size) == (16, padding)
        assert manager._cb_config is config
    assert serve_graphs.options(["m"]) == ["m", "--compile"]
    assert serve_graphs.options(["m", "--continuous-batching"])[-1] == "--cb-use-cuda-graph"


def test_a_port_in_use_is_found_before_the_model_is_loaded(folders, monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda *_: pytest.fail("served"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = ["--host=127.0.0.1", "--port", str(port), "--device", "cpu"]
        result = CliRunner().invoke(app, ["serve", str(folders["kbit"]), *options])
    assert f"cannot listen on port {port} of 127.0.0.1: " in str(result.exception)
    assert "--port 8001" in str(result.exception)


def test_a_missing_tokenizer_is_found_before_the_model_is_loaded(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda *_: pytest.fail("served"))
    bare = shutil.copytree(folders["kbit"], tmp_path / "bare", ignore=shutil.ignore_patterns("*token*"))
    result = CliRunner().invoke(app, ["serve", str(bare)])
    assert isinstance(result.exception, FileNotFoundError)
    assert "has no tokenizer" in str(result.exception)


def test_bench_serve(folders, tmp_path):
    out = tmp_path / "serve.json"
    options = ["--clients", "1,2", "--requests", "1", "--new-tokens", "4", "--prompt-words", "8"]
    options += [f"--option={option}" for option in BATCHED[1:]]
    command = ["bench", "serve", str(folders["kbit"]), "--device", "cpu", *options]
    result = CliRunner().invoke(app, [*command, "--json", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_text())["models"]
    assert [level["clients"] for level in rows["kbit"]] == [1, 2]
    assert all(level["tokens_per_second"] > 0 and not level["errors"] for level in rows["kbit"])


def test_bench_serve_with_random_weights(tmp_path):
    config = PARALLEL["llama"]()
    config.update({"vocab_size": 400, "max_position_embeddings": 512})
    file, out = tmp_path / "config.json", tmp_path / "serve.json"
    write_config(config, file)
    options = [
        "--clients",
        "1,2",
        "--requests",
        "1",
        "--new-tokens",
        "4",
        "--prompt-words",
        "8",
        "--bits",
        "3",
    ]
    options += ["--layers", "1", "--timeout", "120", *(f"--option={option}" for option in BATCHED[1:])]
    command = ["bench", "serve", "--random", str(file), "--device", "cpu", *options, "--json", str(out)]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    models = json.loads(out.read_text())["models"]
    assert list(models) == ["bf16", "kbit-3"]
    for levels in models.values():
        assert [level["tokens"] for level in levels] == [4, 8]  # no answer ended early
        assert not any(level["errors"] for level in levels)


def test_bench_serve_takes_names_as_they_are(monkeypatch):
    started = contextlib.nullcontext((1, 2))
    monkeypatch.setattr(bench, "server", lambda *_: started)
    monkeypatch.setattr(bench, "load", lambda *_: [bench.Level(1, 1)])
    results = {}
    measure = sys.modules["kbit.cli.bench_serve"]._measure
    measure({"d[/x]": Path("d[", "x]")}, PLAN, [], results, None)  # an end of markup that had no beginning
    assert len(results["d[/x]"]) == 1
    result = CliRunner().invoke(app, ["bench", "serve", "--random", "d[/x]"])
    assert "d[/x]" in str(result.exception)
    assert type(result.exception).__name__ != "MarkupError"


@pytest.mark.parametrize("arguments", [[], ["folder", "--random", "llama-3-8b"]])
def test_bench_serve_wants_folders_or_a_name(arguments):
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert result.exit_code == 1
    assert "takes model folders, or --random" in str(result.exception)


def test_bench_serve_wants_a_chat_template(folders, tmp_path, monkeypatch):
    plain = shutil.copytree(folders["kbit"], tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    monkeypatch.setattr(bench, "server", lambda *_: pytest.fail("a server was started"))
    result = CliRunner().invoke(app, ["bench", "serve", str(folders["kbit"]), str(plain)])
    assert isinstance(result.exception, ValueError), repr(result.exception)
    assert f"{plain}: its tokenizer has no chat template" in str(result.exception)


def test_a_server_that_cannot_start_says_why(tmp_path):
    with (
        pytest.raises(RuntimeError, match="ended with code"),
        bench.server(tmp_path / "nothing", ["--device", "cpu"]),
    ):
        pass


@pytest.mark.parametrize("name", ["user@host", "model:q4.gguf"])
def test_a_path_that_transformers_takes_for_another_is_refused(name, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda *_: pytest.fail("served"))
    path = shutil.copytree(folders["kbit"], tmp_path / name)
    result = CliRunner().invoke(app, ["serve", str(path)])
    assert "Rename the folder" in str(result.exception)


@pytest.fixture
def long_answers(folders, tmp_path):
    """A model that answers for minutes."""
    folder = shutil.copytree(folders["kbit"], tmp_path / "long")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 100_000}))
    return folder


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_answers_to_clients_that_have_gone_end(path, long_answers):
    """The next request is answered at once, and so is one that went before its turn came."""
    given = (
        {"messages": [USER]} if "chat" in path else {"prompt": "w1"} if "/v1/c" in path else {"input": "w1"}
    )
    count = "max_output_tokens" if "responses" in path else "max_tokens"
    body = json.dumps({"model": str(long_answers), **given, count: 50_000}).encode()
    with own_process(long_answers, []) as (process, port):
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", port)) as client:
                head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                time.sleep(0.5)
        answer = bench.chat(port, str(long_answers), "w1", 3, timeout=20.0)
        assert answer["usage"]["completion_tokens"] <= 3
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=60)
    assert "Traceback" not in log


def test_a_request_in_parts_and_what_comes_behind_it():
    """The app gets every part of a body, and all that wait for the client's end learn of it."""
    parts = [{"type": "http.request", "body": bytes([i]), "more_body": i < 2} for i in range(3)]
    seen = []

    async def app(scope, receive, send):
        seen.extend([(await receive())["body"] for _ in parts])
        seen.append(serve_gone._gone.get().is_set())
        ends = await asyncio.gather(receive(), receive())
        seen.extend(message["type"] for message in (*ends, await receive()))
        seen.append(serve_gone._gone.get().is_set())

    async def run():
        messages = asyncio.Queue()
        for message in (*parts, {"type": "http.disconnect"}):
            messages.put_nowait(message)
        await serve_gone.Watch(app)({"type": "http"}, messages.get, None)
        assert serve_gone._gone.get() is None

    asyncio.run(run())
    assert seen == [b"\0", b"\1", b"\2", False, *["http.disconnect"] * 3, True]


def test_the_command_hands_every_option_over(monkeypatch):
    taken = []
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda given, *_: taken.extend(given))
    result = CliRunner().invoke(app, ["serve", "org/model", "--port", "0", "--continuous-batching"])
    assert result.exit_code == 0, result.output
    assert taken == ["org/model", "--port", "0", "--continuous-batching"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_told_before_the_model_is_loaded(monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda *_: pytest.fail("served"))
    result = CliRunner().invoke(app, ["serve", "org/model", "--port", "0", "--device=cuda"])
    assert str(result.exception).startswith("no device 'cuda'")


def test_an_option_in_front_of_the_model_is_named(monkeypatch):
    monkeypatch.setattr(sys.modules["kbit.cli.serve"], "serve", lambda *_: pytest.fail("served"))
    result = CliRunner().invoke(app, ["serve", "--port", "8000", "org/model"])
    assert str(result.exception).startswith("MODEL comes before the options, got --port: kbit serve MODEL")


def test_a_chat_without_a_template_is_told_so(folders, tmp_path):
    plain = shutil.copytree(folders["kbit"], tmp_path / "plain")
    (plain / "chat_template.jinja").unlink()
    with bench.server(plain, ["--device", "cpu"], start_timeout=120) as (port, _):
        body = {"model": str(plain), "messages": [USER], "max_tokens": 2}
        status, answer = bench._request(port, "POST", "/v1/chat/completions", body, 60.0)
    assert status == 400, answer
    assert json.loads(answer)["error"]["message"].startswith("the model's tokenizer has no chat template")


def test_answers_end_with_the_models_positions(folders):
    model = AutoModelForCausalLM.from_pretrained(folders["bf16"])
    positions = model.config.max_position_embeddings
    assert texts.known_positions(model) == positions
    for tokens, asked, room, left in ((10, 10**9, None, positions - 10), (10, 5, None, 5), (10, 50, 30, 20)):
        settings = GenerationConfig(max_new_tokens=asked)
        serve_fitting.fit(tokens, settings, room, positions)
        assert settings.max_new_tokens == left
    for tokens in (positions, positions + 5):
        with pytest.raises(serve_fields.RequestError, match=f"the model knows {positions} positions"):
            serve_fitting.fit(tokens, GenerationConfig(max_new_tokens=1), None, positions)
    serve_fitting._check_ids([model.config.vocab_size - 1], model)
    with pytest.raises(serve_fields.RequestError, match="it is another model's"):
        serve_fitting._check_ids(torch.tensor([[1, model.config.vocab_size]]), model)


def test_a_call_whose_turn_comes_too_late():
    submit = serve_gone._checked_first(lambda _, fn, *args: fn(*args))
    assert submit(None, len, "ab") == 2
    gone = threading.Event()
    token = serve_gone._stops.set(gone)
    try:
        assert submit(None, len, "ab") == 2
        gone.set()
        with pytest.raises(serve_gone.ClientGoneError):
            submit(None, len, "ab")
    finally:
        serve_gone._stops.reset(token)
